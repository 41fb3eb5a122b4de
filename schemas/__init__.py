"""The wire contract (protocol.md) as code: headers, records, codecs, the reader rule. Imports nothing of ours."""
