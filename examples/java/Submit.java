import java.io.ByteArrayOutputStream;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.nio.file.Path;
import java.security.KeyFactory;
import java.security.MessageDigest;
import java.security.PrivateKey;
import java.security.SecureRandom;
import java.security.Signature;
import java.security.spec.PKCS8EncodedKeySpec;
import java.util.Base64;
import java.util.HexFormat;
import java.util.Map;
import org.apache.kafka.clients.producer.KafkaProducer;
import org.apache.kafka.clients.producer.ProducerRecord;
import org.apache.kafka.common.serialization.ByteArraySerializer;

/**
 * Submits a task, signed with a key of its tenant, and prints the task's number.
 *
 * <p>Arguments: the brokers, the URL of the registry, the namespace, the file of the private key, the
 * public key as `headrace keys show FILE` prints it (Java's library can't derive it), the tenant, the id
 * of the task, and its payload as JSON. If a task is submitted twice, it runs once.
 */
public final class Submit {
    private static final String SOURCE = "team";

    public static void main(String[] arguments) throws Exception {
        String topic = arguments[2] + ".tasks.v1";
        String id = SOURCE + "/" + arguments[6];
        byte[] value = new Registry(arguments[1])
            .encode(topic, task(arguments[5], arguments[6], arguments[7]));
        // The topic has one partition.
        var record = new ProducerRecord<>(topic, 0, bytes(id), value);
        record.headers()
            .add("ce_specversion", bytes("1.0"))
            .add("ce_source", bytes(SOURCE))
            .add("content-type", bytes("application/avro"))
            .add("ce_id", bytes(id))
            .add("ce_type", bytes("headrace.TaskSubmitted"))
            .add("traceparent", bytes("00-" + randomHex(16) + "-" + randomHex(8) + "-01"))
            .add("headrace_request", bytes(
                arguments[4] + ":" + signature(privateKey(Path.of(arguments[3])), topic, value)));
        Map<String, Object> writing = Map.of("bootstrap.servers", arguments[0]);
        try (var producer = new KafkaProducer<>(
                writing, new ByteArraySerializer(), new ByteArraySerializer())) {
            System.out.println(producer.send(record).get().offset());
        }
    }

    /** The agent, the policy and the limits are those of the run's recipe, or others that it allows. */
    private static Map<String, Object> task(String tenant, String id, String payload) {
        Map<String, Object> policy = Map.of("policy", "default", "sampling", Map.of("max_tokens", 1));
        return Map.ofEntries(
            Map.entry("source", SOURCE),
            Map.entry("task_id", id),
            Map.entry("tenant", tenant),
            Map.entry("item_id", id),
            Map.entry("agent", "default"),
            Map.entry("roles", Map.of("policy", policy)),
            Map.entry("payload", payload),
            Map.entry("samples", 4),
            Map.entry("max_turns", 1),
            Map.entry("max_tokens", 1),
            Map.entry("deadline_s", 120));
    }

    /** Signs the topic and the digest of the value, so that it counts for this record alone. */
    private static String signature(PrivateKey key, String topic, byte[] value) throws Exception {
        var message = new ByteArrayOutputStream();
        message.write(bytes("headrace.request.v1\n" + topic + "\n"));
        message.write(MessageDigest.getInstance("SHA-256").digest(value));
        Signature signer = Signature.getInstance("Ed25519");
        signer.initSign(key);
        signer.update(message.toByteArray());
        return Base64.getEncoder().encodeToString(signer.sign());
    }

    /** Reads a file as `headrace keys new` writes it: PKCS #8 in PEM, without a password. */
    private static PrivateKey privateKey(Path file) throws Exception {
        String body = Files.readString(file).replaceAll("-----[A-Z ]+-----", "");
        var encoded = new PKCS8EncodedKeySpec(Base64.getMimeDecoder().decode(body));
        return KeyFactory.getInstance("Ed25519").generatePrivate(encoded);
    }

    private static String randomHex(int bytes) {
        byte[] drawn = new byte[bytes];
        new SecureRandom().nextBytes(drawn);
        return HexFormat.of().formatHex(drawn);
    }

    private static byte[] bytes(String text) {
        return text.getBytes(StandardCharsets.UTF_8);
    }
}
