// Results prints each task that has ended, with the rewards of its episodes, until so many have come.
//
// Arguments: the brokers, the URL of the registry, the namespace, the number of tasks.
package main

import (
	"context"
	"fmt"
	"log"
	"os"
	"slices"
	"strconv"
	"strings"

	"example.com/headrace/registry"
	"github.com/twmb/franz-go/pkg/kgo"
)

type result struct {
	Task     int64     `avro:"task"`
	Outcomes []outcome `avro:"outcomes"`
}

type outcome struct {
	Sample int      `avro:"sample"`
	Reward *float64 `avro:"reward"`
}

func main() {
	if err := run(os.Args[1], os.Args[2], os.Args[3], os.Args[4]); err != nil {
		log.Fatal(err)
	}
}

func run(brokers, url, namespace, count string) error {
	wanted, err := strconv.Atoi(count)
	if err != nil {
		return err
	}
	client, err := kgo.NewClient(
		kgo.SeedBrokers(strings.Split(brokers, ",")...),
		kgo.ConsumerGroup("results-in-go"),
		kgo.ConsumeTopics(namespace+".results.v1"),
		kgo.ConsumeResetOffset(kgo.NewOffset().AtStart()),
		kgo.FetchIsolationLevel(kgo.ReadCommitted()),
	)
	if err != nil {
		return err
	}
	defer client.Close()
	schemas := registry.New(url)
	seen := map[int64]bool{}
	for len(seen) < wanted {
		fetches := client.PollFetches(context.Background())
		if err := fetches.Err(); err != nil {
			return err
		}
		for _, record := range fetches.Records() {
			var ended result
			if err := schemas.Decode(record.Value, &ended); err != nil {
				return err
			}
			if seen[ended.Task] {
				continue // If two records have the same id, the first one counts.
			}
			seen[ended.Task] = true
			fmt.Printf("%d:", ended.Task)
			// They come as they ended.
			slices.SortStableFunc(ended.Outcomes, func(one, other outcome) int {
				return one.Sample - other.Sample
			})
			for _, one := range ended.Outcomes {
				if one.Reward == nil {
					fmt.Print(" null")
				} else {
					fmt.Printf(" %g", *one.Reward)
				}
			}
			fmt.Println()
		}
	}
	return nil
}
