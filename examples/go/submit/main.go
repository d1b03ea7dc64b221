// Submit submits a task, signed with a key of its tenant, and prints the task's number.
//
// Arguments: the brokers, the URL of the registry, the namespace, the file of the private key, the tenant, the
// id of the task, and its payload as JSON. If a task is submitted twice, it runs once.
package main

import (
	"context"
	"crypto/ed25519"
	"crypto/rand"
	"crypto/sha256"
	"crypto/x509"
	"encoding/base64"
	"encoding/pem"
	"fmt"
	"log"
	"os"
	"strings"

	"example.com/headrace/registry"
	"github.com/twmb/franz-go/pkg/kgo"
)

const source = "team"

type task struct {
	Source    string         `avro:"source"`
	TaskID    string         `avro:"task_id"`
	Tenant    string         `avro:"tenant"`
	ItemID    string         `avro:"item_id"`
	Agent     string         `avro:"agent"`
	Roles     map[string]use `avro:"roles"`
	Payload   string         `avro:"payload"`
	Samples   int            `avro:"samples"`
	MaxTurns  int            `avro:"max_turns"`
	MaxTokens int            `avro:"max_tokens"`
	DeadlineS int            `avro:"deadline_s"`
}

// The policy that plays a role.
type use struct {
	Policy   string   `avro:"policy"`
	Sampling sampling `avro:"sampling"`
}

type sampling struct {
	MaxTokens int `avro:"max_tokens"`
}

func main() {
	if err := run(os.Args[1], os.Args[2], os.Args[3], os.Args[4], os.Args[5], os.Args[6], os.Args[7]); err != nil {
		log.Fatal(err)
	}
}

func run(brokers, url, namespace, file, tenant, id, payload string) error {
	key, err := privateKey(file)
	if err != nil {
		return err
	}
	// The agent, the policy and the limits are those of the run's recipe, or others that it allows.
	submitted := task{
		Source:    source,
		TaskID:    id,
		Tenant:    tenant,
		ItemID:    id,
		Agent:     "default",
		Roles:     map[string]use{"policy": {"default", sampling{MaxTokens: 1}}},
		Payload:   payload,
		Samples:   4,
		MaxTurns:  1,
		MaxTokens: 1,
		DeadlineS: 120,
	}
	topic := namespace + ".tasks.v1"
	value, err := registry.New(url).Encode(topic, submitted)
	if err != nil {
		return err
	}
	client, err := kgo.NewClient(kgo.SeedBrokers(strings.Split(brokers, ",")...))
	if err != nil {
		return err
	}
	defer client.Close()
	// The topic has one partition.
	record := &kgo.Record{Topic: topic, Key: []byte(source + "/" + id), Value: value}
	var trace [24]byte
	rand.Read(trace[:])
	for _, header := range [][2]string{
		{"ce_specversion", "1.0"},
		{"ce_source", source},
		{"content-type", "application/avro"},
		{"ce_id", string(record.Key)},
		{"ce_type", "headrace.TaskSubmitted"},
		{"traceparent", fmt.Sprintf("00-%x-%x-01", trace[:16], trace[16:])},
		{"headrace_request", sign(key, topic, value)},
	} {
		record.Headers = append(record.Headers, kgo.RecordHeader{Key: header[0], Value: []byte(header[1])})
	}
	if err := client.ProduceSync(context.Background(), record).FirstErr(); err != nil {
		return err
	}
	fmt.Println(record.Offset)
	return nil
}

// sign returns the public key and the signature of the topic and the value's digest, which counts for this
// record alone.
func sign(key ed25519.PrivateKey, topic string, value []byte) string {
	digest := sha256.Sum256(value)
	message := append([]byte("headrace.request.v1\n"+topic+"\n"), digest[:]...)
	public := base64.StdEncoding.EncodeToString(key.Public().(ed25519.PublicKey))
	return "ed25519:" + public + ":" + base64.StdEncoding.EncodeToString(ed25519.Sign(key, message))
}

// privateKey reads a file as `headrace keys new` writes it: PKCS #8 in PEM, without a password.
func privateKey(file string) (ed25519.PrivateKey, error) {
	data, err := os.ReadFile(file)
	if err != nil {
		return nil, err
	}
	block, _ := pem.Decode(data)
	if block == nil {
		return nil, fmt.Errorf("%s is not a PEM file", file)
	}
	parsed, err := x509.ParsePKCS8PrivateKey(block.Bytes)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", file, err)
	}
	key, ok := parsed.(ed25519.PrivateKey)
	if !ok {
		return nil, fmt.Errorf("%s holds no Ed25519 key", file)
	}
	return key, nil
}
