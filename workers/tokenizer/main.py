"""The tokenizer as a process: settings in, exit code out. Never loads torch."""

from __future__ import annotations

from dataclasses import replace

import orjson

from common.settings import Settings
from workers import process
from workers.checkpoint import load_config, locate
from workers.process import Process
from workers.text.chat import ChatTemplate
from workers.text.codec import TokenCodec
from workers.text.source import load_source, read_template
from workers.tokenizer.jobs import Jobs
from workers.tokenizer.worker import TokenizerWorker, Work


def run(settings: Settings) -> int:
    """Runs a tokenizer until it is told to stop; returns the exit code."""
    return process.main(settings, "tokenizer", _start)


def _start(proc: Process) -> int:
    settings = proc.settings
    checkpoint = locate(settings.model, weights=False)
    config = load_config(checkpoint)
    limit = config.max_position_embeddings
    if settings.max_model_len is not None:
        limit = min(settings.max_model_len, limit)

    def load() -> Work:
        source = load_source(checkpoint)
        if settings.chat_template:
            source = replace(source, chat_templates={"default": read_template(settings.chat_template)})
        return Jobs(
            TokenCodec(source),
            ChatTemplate.of(source),
            config.vocab_size,
            template_kwargs=orjson.loads(settings.default_chat_template_kwargs),
        ).work

    worker = TokenizerWorker(
        proc.bus,
        proc.keys,
        load,
        model=settings.served_model_name,
        max_model_len=limit,
        worker=proc.worker_id,
        partitions=settings.partitions,
        lease_ms=settings.lease_ms,
        steadiness=proc.lease.steadiness,
        ttl_ms=proc.reply_ttl_ms,
        life_ms=int((settings.request_timeout + settings.deadline_grace) * 1000),
    )
    return proc.run(worker, worker.stats)
