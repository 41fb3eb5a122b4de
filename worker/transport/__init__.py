"""Kafka lives here: intake, offsets, the writer rule, replies, control."""
