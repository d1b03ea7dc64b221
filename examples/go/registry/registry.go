// Package registry reads and writes values in Confluent's framing: byte 0, the id of the schema, the Avro body.
package registry

import (
	"encoding/binary"
	"encoding/json"
	"fmt"
	"net/http"
	"net/url"
	"time"

	"github.com/hamba/avro/v2"
)

const bound = 30 * time.Second

// A Registry keeps each schema that it has read. One goroutine may use it.
type Registry struct {
	url     string
	client  http.Client
	schemas map[uint32]avro.Schema
	newest  map[string]uint32
}

// New returns the registry at this URL.
func New(url string) *Registry {
	return &Registry{url, http.Client{Timeout: bound}, map[uint32]avro.Schema{}, map[string]uint32{}}
}

// Decode reads a value into a struct. Its fields name those that it wants, as `avro:"task"`.
func (r *Registry) Decode(value []byte, into any) error {
	if len(value) < 5 || value[0] != 0 {
		return fmt.Errorf("the value has no Confluent framing")
	}
	schema, err := r.schema(binary.BigEndian.Uint32(value[1:5]))
	if err != nil {
		return err
	}
	return avro.Unmarshal(schema, value[5:], into)
}

// Encode writes a struct with the newest schema of a topic. Fields that the struct lacks get their defaults.
func (r *Registry) Encode(topic string, from any) ([]byte, error) {
	id, known := r.newest[topic]
	if !known {
		var answer struct {
			ID uint32 `json:"id"`
		}
		if err := r.ask("subjects/"+url.PathEscape(topic)+"-value/versions/latest", &answer); err != nil {
			return nil, err
		}
		id = answer.ID
		r.newest[topic] = id
	}
	schema, err := r.schema(id)
	if err != nil {
		return nil, err
	}
	body, err := avro.Marshal(schema, from)
	return append(binary.BigEndian.AppendUint32([]byte{0}, id), body...), err
}

func (r *Registry) schema(id uint32) (avro.Schema, error) {
	if found, known := r.schemas[id]; known {
		return found, nil
	}
	var answer struct {
		Schema string `json:"schema"`
	}
	if err := r.ask(fmt.Sprintf("schemas/ids/%d", id), &answer); err != nil {
		return nil, err
	}
	parsed, err := avro.Parse(answer.Schema)
	if err == nil {
		r.schemas[id] = parsed
	}
	return parsed, err
}

func (r *Registry) ask(path string, into any) error {
	answer, err := r.client.Get(r.url + "/" + path)
	if err != nil {
		return err
	}
	defer answer.Body.Close()
	if answer.StatusCode != http.StatusOK {
		return fmt.Errorf("%s: the registry answered %s", path, answer.Status)
	}
	return json.NewDecoder(answer.Body).Decode(into)
}
