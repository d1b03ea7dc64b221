import java.io.ByteArrayOutputStream;
import java.io.IOException;
import java.net.URI;
import java.net.http.HttpClient;
import java.net.http.HttpRequest;
import java.net.http.HttpResponse;
import java.nio.ByteBuffer;
import java.time.Duration;
import java.util.HashMap;
import java.util.Map;
import com.fasterxml.jackson.databind.JsonNode;
import com.fasterxml.jackson.databind.ObjectMapper;
import org.apache.avro.Schema;
import org.apache.avro.generic.GenericData;
import org.apache.avro.generic.GenericDatumReader;
import org.apache.avro.generic.GenericDatumWriter;
import org.apache.avro.generic.GenericRecord;
import org.apache.avro.io.BinaryEncoder;
import org.apache.avro.io.DecoderFactory;
import org.apache.avro.io.EncoderFactory;

/** Reads and writes values in Confluent's framing: byte 0, the id of the schema, the Avro body. */
final class Registry {
    private static final Duration BOUND = Duration.ofSeconds(30);
    private final HttpClient client = HttpClient.newBuilder().connectTimeout(BOUND).build();
    private final Map<Integer, Schema> schemas = new HashMap<>();
    private final String url;

    Registry(String url) {
        this.url = url;
    }

    GenericRecord decode(byte[] value) throws IOException, InterruptedException {
        ByteBuffer frame = ByteBuffer.wrap(value);
        if (value.length < 5 || frame.get() != 0) {
            throw new IOException("the value has no Confluent framing");
        }
        Schema schema = schema(frame.getInt());
        var decoder = DecoderFactory.get().binaryDecoder(value, 5, value.length - 5, null);
        return new GenericDatumReader<GenericRecord>(schema).read(null, decoder);
    }

    /**
     * Encodes with the newest schema of a topic. `fields` are those without a default, or more. Records
     * in them may be maps, too.
     */
    byte[] encode(String topic, Map<String, Object> fields) throws IOException, InterruptedException {
        JsonNode newest = ask("subjects/" + topic + "-value/versions/latest");
        int id = newest.get("id").asInt();
        Schema schema = schema(id);
        GenericRecord record = record(schema, fields);
        ByteArrayOutputStream body = new ByteArrayOutputStream();
        body.write(ByteBuffer.allocate(5).put((byte) 0).putInt(id).array());
        BinaryEncoder encoder = EncoderFactory.get().binaryEncoder(body, null);
        new GenericDatumWriter<GenericRecord>(schema).write(record, encoder);
        encoder.flush();
        return body.toByteArray();
    }

    private static GenericRecord record(Schema schema, Map<?, ?> fields) {
        GenericRecord record = new GenericData.Record(schema);
        for (Schema.Field field : schema.getFields()) {
            record.put(field.pos(), fields.containsKey(field.name())
                ? value(field.schema(), fields.get(field.name()))
                : GenericData.get().getDefaultValue(field));
        }
        return record;
    }

    private static Object value(Schema schema, Object given) {
        if (!(given instanceof Map<?, ?> map)) {
            return given;
        }
        return switch (schema.getType()) {
            case RECORD -> record(schema, map);
            case UNION -> value(schema.getTypes().get(1), map); // The other type is null.
            default -> {
                Map<Object, Object> values = new HashMap<>();
                map.forEach((key, one) -> values.put(key, value(schema.getValueType(), one)));
                yield values;
            }
        };
    }

    private Schema schema(int id) throws IOException, InterruptedException {
        if (!schemas.containsKey(id)) {
            String text = ask("schemas/ids/" + id).get("schema").asText();
            schemas.put(id, new Schema.Parser().parse(text));
        }
        return schemas.get(id);
    }

    private JsonNode ask(String path) throws IOException, InterruptedException {
        HttpRequest request = HttpRequest.newBuilder(URI.create(url + "/" + path)).timeout(BOUND).build();
        HttpResponse<String> answer = client.send(request, HttpResponse.BodyHandlers.ofString());
        if (answer.statusCode() != 200) {
            throw new IOException(path + ": the registry answered " + answer.statusCode());
        }
        return new ObjectMapper().readTree(answer.body());
    }
}
