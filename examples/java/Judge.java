import java.time.Duration;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import com.fasterxml.jackson.databind.ObjectMapper;
import org.apache.avro.generic.GenericRecord;
import org.apache.kafka.clients.consumer.KafkaConsumer;
import org.apache.kafka.clients.producer.KafkaProducer;
import org.apache.kafka.clients.producer.ProducerRecord;
import org.apache.kafka.common.serialization.ByteArrayDeserializer;
import org.apache.kafka.common.serialization.ByteArraySerializer;

/**
 * A judge: answers each score that is asked of the environment `jury` with the share of vowels.
 *
 * <p>Arguments: the brokers, the URL of the registry, the namespace. It commits behind each answer,
 * so after a crash it may answer again. The first answer counts.
 */
public final class Judge {
    public static void main(String[] arguments) throws Exception {
        String servers = arguments[0];
        Registry registry = new Registry(arguments[1]);
        String actions = arguments[2] + ".actions.v1";
        String observations = arguments[2] + ".observations.v1";
        Map<String, Object> reading = Map.of(
            "bootstrap.servers", servers,
            "group.id", "the-jury",
            "auto.offset.reset", "earliest",
            "enable.auto.commit", false,
            "max.poll.records", 1,
            "isolation.level", "read_committed");
        Map<String, Object> writing = Map.of("bootstrap.servers", servers);
        try (var consumer = new KafkaConsumer<>(
                reading, new ByteArrayDeserializer(), new ByteArrayDeserializer());
            var producer = new KafkaProducer<>(
                writing, new ByteArraySerializer(), new ByteArraySerializer())) {
            consumer.subscribe(List.of(actions));
            while (true) {
                for (var record : consumer.poll(Duration.ofSeconds(1))) {
                    GenericRecord action = registry.decode(record.value());
                    GenericRecord environment = (GenericRecord) action.get("environment");
                    boolean ours = environment.get("use").toString().equals("jury");
                    if (ours && action.get("kind").toString().equals("score")) {
                        byte[] answer = registry.encode(observations, answer(action));
                        // The same key, to the partition of the same number: there the agent reads.
                        producer.send(new ProducerRecord<>(
                            observations, record.partition(), record.key(), answer)).get();
                        System.out.println("answered " + action.get("task") + " " + action.get("sample"));
                    }
                }
                consumer.commitSync();
            }
        }
    }

    private static Map<String, Object> answer(GenericRecord action) throws Exception {
        Map<String, Object> fields = new HashMap<>();
        for (String name : List.of("task", "sample", "attempt", "call", "index", "digest")) {
            fields.put(name, action.get(name));
        }
        String said = new ObjectMapper().readTree(action.get("payload").toString()).get("said").asText();
        long vowels = said.chars().filter(letter -> "aeiou".indexOf(letter) >= 0).count();
        fields.put("reward", (double) vowels / Math.max(1, said.length()));
        return fields;
    }
}
