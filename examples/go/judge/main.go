// Judge answers each score that is asked of the environment `jury` with the share of vowels.
//
// Arguments: the brokers, the URL of the registry, the namespace. It commits behind its answers, so after a
// crash it may answer again. The first answer counts.
package main

import (
	"context"
	"encoding/json"
	"fmt"
	"log"
	"os"
	"strings"

	"example.com/headrace/registry"
	"github.com/twmb/franz-go/pkg/kgo"
)

// What an answer repeats of its action.
type call struct {
	Task    int64    `avro:"task"`
	Sample  int      `avro:"sample"`
	Attempt int      `avro:"attempt"`
	Call    string   `avro:"call"`
	Index   int      `avro:"index"`
	Digest  [16]byte `avro:"digest"`
}

type action struct {
	call
	Kind        string `avro:"kind"`
	Payload     string `avro:"payload"`
	Environment struct {
		Use string `avro:"use"`
	} `avro:"environment"`
}

type observation struct {
	call
	Reward *float64 `avro:"reward"`
}

func main() {
	if err := run(os.Args[1], os.Args[2], os.Args[3]); err != nil {
		log.Fatal(err)
	}
}

func run(brokers, url, namespace string) error {
	observations := namespace + ".observations.v1"
	client, err := kgo.NewClient(
		kgo.SeedBrokers(strings.Split(brokers, ",")...),
		kgo.ConsumerGroup("the-jury"),
		kgo.ConsumeTopics(namespace+".actions.v1"),
		kgo.ConsumeResetOffset(kgo.NewOffset().AtStart()),
		kgo.FetchIsolationLevel(kgo.ReadCommitted()),
		kgo.DisableAutoCommit(),
		kgo.RecordPartitioner(kgo.ManualPartitioner()),
	)
	if err != nil {
		return err
	}
	defer client.Close()
	schemas, always := registry.New(url), context.Background()
	for {
		fetches := client.PollFetches(always)
		if err := fetches.Err(); err != nil {
			return err
		}
		for _, record := range fetches.Records() {
			answer, err := judge(schemas, observations, record)
			if err != nil {
				return err
			}
			if answer != nil {
				if err := client.ProduceSync(always, answer).FirstErr(); err != nil {
					return err
				}
			}
		}
		if err := client.CommitUncommittedOffsets(always); err != nil {
			return err
		}
	}
}

// judge returns the answer to a record; nil if the record asks nothing of this judge.
func judge(schemas *registry.Registry, topic string, record *kgo.Record) (*kgo.Record, error) {
	var asked action
	if err := schemas.Decode(record.Value, &asked); err != nil {
		return nil, err
	}
	if asked.Kind != "score" || asked.Environment.Use != "jury" {
		return nil, nil
	}
	var payload struct {
		Said string `json:"said"`
	}
	if err := json.Unmarshal([]byte(asked.Payload), &payload); err != nil {
		return nil, err
	}
	vowels := 0
	for _, letter := range payload.Said {
		if strings.ContainsRune("aeiou", letter) {
			vowels++
		}
	}
	reward := float64(vowels) / float64(max(1, len(payload.Said)))
	value, err := schemas.Encode(topic, observation{asked.call, &reward})
	fmt.Println("answered", asked.Task, asked.Sample)
	// The same key, to the partition of the same number: there the agent reads.
	return &kgo.Record{Topic: topic, Partition: record.Partition, Key: record.Key, Value: value}, err
}
