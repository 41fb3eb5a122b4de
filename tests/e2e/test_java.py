"""The Java of docs/first-hour.md: compiled against Spring for Apache Kafka, and run against a worker."""

import asyncio
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from service.client import Client
from tests.deploy.stack import ROOT
from tests.e2e.workers import WorkerProcess, producing
from tests.test_docs import blocks

LANES = "java."
# What the text leaves to the reader: imports, the object mapper, the beans' wiring, and the topics.
PROGRAM = """
import static java.nio.charset.StandardCharsets.UTF_8;

import com.fasterxml.jackson.databind.JsonNode;
import com.fasterxml.jackson.databind.ObjectMapper;
import java.time.Duration;
import java.util.Collection;
import java.util.List;
import java.util.Map;
import java.util.UUID;
import org.apache.kafka.clients.admin.Admin;
import org.apache.kafka.clients.admin.NewTopic;
import org.apache.kafka.clients.consumer.ConsumerRecord;
import org.apache.kafka.clients.producer.ProducerRecord;
import org.apache.kafka.common.serialization.StringDeserializer;
import org.apache.kafka.common.serialization.StringSerializer;
import org.springframework.context.annotation.Bean;
import org.springframework.kafka.config.ConcurrentKafkaListenerContainerFactory;
import org.springframework.kafka.core.ConsumerFactory;
import org.springframework.kafka.core.DefaultKafkaConsumerFactory;
import org.springframework.kafka.core.DefaultKafkaProducerFactory;
import org.springframework.kafka.core.ProducerFactory;
import org.springframework.kafka.listener.ConcurrentMessageListenerContainer;
import org.springframework.kafka.listener.ContainerProperties;
import org.springframework.kafka.listener.GenericMessageListenerContainer;
import org.springframework.kafka.listener.KafkaMessageListenerContainer;
import org.springframework.kafka.requestreply.AggregatingReplyingKafkaTemplate;
import org.springframework.kafka.requestreply.ReplyingKafkaTemplate;

public class FirstHour {
    static final ObjectMapper objectMapper = new ObjectMapper();
    ReplyingKafkaTemplate<String, String, String> carousel;
    AggregatingReplyingKafkaTemplate<String, String, String> streams;

    static JsonNode parse(String value) {
        try {
            return objectMapper.readTree(value);
        } catch (Exception e) {
            throw new IllegalArgumentException(e);
        }
    }

%s

    public static void main(String[] arguments) throws Exception {
        Map<String, Object> kafka = Map.of("bootstrap.servers", arguments[0]);
        try (Admin admin = Admin.create(kafka)) {
            admin.createTopics(List.of(new NewTopic("replies.billing", 1, (short) 1),
                    new NewTopic("replies.billing-streams", 1, (short) 1))).all().get();
        }
        var write = new StringSerializer();
        var read = new StringDeserializer();
        var producers = new DefaultKafkaProducerFactory<String, String>(kafka, write, write);
        var consumers = new DefaultKafkaConsumerFactory<String, String>(kafka, read, read);
        var containers = new ConcurrentKafkaListenerContainerFactory<String, String>();
        containers.setConsumerFactory(consumers);
        var service = new FirstHour();
        service.carousel = service.carousel(producers, containers);
        service.streams = service.streams(producers, consumers);
        service.carousel.start();
        service.streams.start();
        service.carousel.waitForAssignment(Duration.ofSeconds(60));
        service.streams.waitForAssignment(Duration.ofSeconds(60));
        String answer = service.ask("Why is the sky blue?");
        var request = new ProducerRecord<String, String>("%sinteractive", arguments[1]);
        request.headers().add("content-type", "application/json".getBytes(UTF_8));
        String streamed = service.stream(request);
        System.out.println(objectMapper.writeValueAsString(Map.of("answer", answer, "streamed", streamed)));
        System.exit(0);
    }
}
"""


def java(folder: Path, *words: str) -> str:
    """Runs javac or java with Spring's and Kafka's libraries; returns its standard output."""
    shared = ROOT.parent / "shared"
    path = f"{folder}:{shared}/checks/spring/libs/*:{shared}/kafka/libs/*"
    done = subprocess.run([words[0], "-cp", path, *words[1:]], capture_output=True, text=True, check=False, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.kafka
@pytest.mark.shared
async def test_the_java_of_the_first_hour(kafka: Any, checks: Path, tmp_path: Path):
    """It compiles without a warning and is answered: the one reply, and the stream as our own client has it."""
    if not (checks / "spring/libs").is_dir():
        pytest.skip(f"no Spring: {checks}/spring/libs does not exist")
    if shutil.which("javac") is None:
        pytest.skip("no Java compiler: install Debian's package default-jdk-headless")
    snippets = [content for language, content in blocks(ROOT / "docs/first-hour.md") if language == "java"]
    assert len(snippets) == 2
    program = PROGRAM % ("\n".join(snippets).replace('"prompts.', f'"{LANES}'), LANES)
    (tmp_path / "FirstHour.java").write_text(program)
    compiler = ("javac", "-Xlint:all,-classfile,-path", "-proc:none", "-Werror", "-d", str(tmp_path))
    await asyncio.to_thread(java, tmp_path, *compiler, str(tmp_path / "FirstHour.java"))
    async with producing(kafka.bootstrap, LANES, partitions=1):
        with WorkerProcess(kafka.bootstrap, tmp_path / "worker.log", "--lane-prefix", LANES):
            request = {"prompt": "Once upon a time", "max_tokens": 50, "temperature": 0, "ignore_eos": True}
            words = ("java", f"-Dlog4j2.configurationFile={ROOT.parent}/shared/kafka/log4j2.properties", "FirstHour")
            printed = await asyncio.to_thread(java, tmp_path, *words, kafka.bootstrap, json.dumps(request))
            async with Client(kafka.bootstrap, lane_prefix=LANES) as client:
                expected = await client.complete(tier="interactive", **request)
    answered = json.loads(printed)
    assert answered["answer"] != ""
    assert answered["streamed"] == expected.text
