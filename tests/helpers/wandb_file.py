"""Reads back what W&B writes offline, through the messages that its own package defines."""

from __future__ import annotations

import json
import struct
import time


def wandb_records(folder):
    """Every record of an offline W&B run, read by the rules of its file format (LevelDB's log with a 7-byte head)."""
    from wandb.proto import wandb_internal_pb2

    file = max(folder.glob("wandb/offline-run-*/*.wandb"))
    data, at, parts, records = file.read_bytes(), 7, b"", []
    while at + 7 <= len(data):
        rest = 32768 - at % 32768
        if rest < 7:
            at += rest
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + 7])
        parts += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            record = wandb_internal_pb2.Record()
            record.ParseFromString(parts)
            records.append(record)
            parts = b""
    return records


def history(folder):
    """Logged rows by column, once the file is complete: W&B's own process writes it shortly after `finish`."""
    deadline_s = time.monotonic() + 20.0
    while not any(record.HasField("exit") for record in wandb_records(folder)):
        assert time.monotonic() < deadline_s, "W&B did not finish its file"
        time.sleep(0.1)
    rows = []
    for record in wandb_records(folder):
        if record.WhichOneof("record_type") == "history":
            rows.append({"/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in record.history.item})
    return rows
