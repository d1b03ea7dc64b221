// Results prints each task that has ended, with the rewards of its episodes, until so many have come.
//
// Arguments: the brokers, the URL of the registry, the namespace, the number of tasks.
package main

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"log"
	"net/http"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/hamba/avro/v2"
	"github.com/twmb/franz-go/pkg/kgo"
)

// A registry reads values in Confluent's framing: byte 0, the id of the schema, the Avro body.
type registry struct {
	url     string
	client  http.Client
	schemas map[uint32]avro.Schema
}

func (r *registry) schema(id uint32) (avro.Schema, error) {
	if found, known := r.schemas[id]; known {
		return found, nil
	}
	answer, err := r.client.Get(fmt.Sprintf("%s/schemas/ids/%d", r.url, id))
	if err != nil {
		return nil, err
	}
	defer answer.Body.Close()
	var body struct {
		Schema string `json:"schema"`
	}
	if answer.StatusCode != http.StatusOK {
		return nil, fmt.Errorf("schema %d: the registry answered %s", id, answer.Status)
	}
	if err := json.NewDecoder(answer.Body).Decode(&body); err != nil {
		return nil, err
	}
	parsed, err := avro.Parse(body.Schema)
	if err == nil {
		r.schemas[id] = parsed
	}
	return parsed, err
}

func (r *registry) decode(value []byte, into any) error {
	if len(value) < 5 || value[0] != 0 {
		return fmt.Errorf("the value has no Confluent framing")
	}
	schema, err := r.schema(binary.BigEndian.Uint32(value[1:5]))
	if err != nil {
		return err
	}
	return avro.Unmarshal(schema, value[5:], into)
}

type result struct {
	Task     int64     `avro:"task"`
	Outcomes []outcome `avro:"outcomes"`
}

type outcome struct {
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
	schemas := registry{url, http.Client{Timeout: 30 * time.Second}, map[uint32]avro.Schema{}}
	seen := map[int64]bool{}
	for len(seen) < wanted {
		fetches := client.PollFetches(context.Background())
		if err := fetches.Err(); err != nil {
			return err
		}
		for _, record := range fetches.Records() {
			var ended result
			if err := schemas.decode(record.Value, &ended); err != nil {
				return err
			}
			if seen[ended.Task] {
				continue // If two records have the same id, the first one counts.
			}
			seen[ended.Task] = true
			fmt.Printf("%d:", ended.Task)
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
