"""The engine: pure, deterministic Python. No torch, no Kafka, no asyncio, no clock but the one passed in."""
