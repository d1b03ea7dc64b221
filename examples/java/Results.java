import java.time.Duration;
import java.util.HashSet;
import java.util.List;
import java.util.Map;
import java.util.Set;
import java.util.TreeMap;
import org.apache.avro.generic.GenericRecord;
import org.apache.kafka.clients.consumer.KafkaConsumer;
import org.apache.kafka.common.serialization.ByteArrayDeserializer;

/**
 * Prints each task that has ended, with the rewards of its episodes, until so many have come.
 *
 * <p>Arguments: the brokers, the URL of the registry, the namespace, the number of tasks.
 */
public final class Results {
    public static void main(String[] arguments) throws Exception {
        Registry registry = new Registry(arguments[1]);
        int wanted = Integer.parseInt(arguments[3]);
        Map<String, Object> reading = Map.of(
            "bootstrap.servers", arguments[0],
            "group.id", "results-in-java",
            "auto.offset.reset", "earliest",
            "isolation.level", "read_committed");
        Set<Object> seen = new HashSet<>();
        try (var consumer = new KafkaConsumer<>(
                reading, new ByteArrayDeserializer(), new ByteArrayDeserializer())) {
            consumer.subscribe(List.of(arguments[2] + ".results.v1"));
            while (seen.size() < wanted) {
                for (var record : consumer.poll(Duration.ofSeconds(1))) {
                    GenericRecord result = registry.decode(record.value());
                    if (!seen.add(result.get("task"))) {
                        continue; // If two records have the same id, the first one counts.
                    }
                    StringBuilder rewards = new StringBuilder();
                    TreeMap<Integer, Object> bySample = new TreeMap<>(); // They come as they ended.
                    for (Object one : (List<?>) result.get("outcomes")) {
                        GenericRecord outcome = (GenericRecord) one;
                        bySample.putIfAbsent((Integer) outcome.get("sample"), outcome.get("reward"));
                    }
                    bySample.values().forEach(reward -> rewards.append(' ').append(reward));
                    System.out.println(result.get("task") + ":" + rewards);
                }
            }
        }
    }
}
