"""The scheduler as a process: settings in, exit code out. The only place that builds a real engine."""

from __future__ import annotations

from common.bus.registry import ModelInfo
from common.logging import Log
from common.settings import Settings, bound_spinning
from workers import process
from workers.checkpoint import Checkpoint, ModelConfig, load_config, locate, sampling_defaults
from workers.engine.config import EngineConfig
from workers.engine.core import NativeEngine
from workers.engine.null import NullEngine
from workers.engine.types import Engine
from workers.process import Process
from workers.scheduler.worker import SchedulerWorker

log = Log(__name__)


def run(settings: Settings) -> int:
    """Runs a scheduler until it is told to stop; returns the exit code."""
    return process.main(settings, "scheduler", _start)


def _start(proc: Process) -> int:
    settings = proc.settings
    checkpoint = locate(settings.model)
    config = load_config(checkpoint)
    builder = _Builder(settings, checkpoint, config)
    worker = SchedulerWorker(
        proc.bus,
        proc.keys,
        builder.engine,
        model=settings.served_model_name,
        worker=proc.worker_id,
        partitions=settings.partitions,
        lease_ms=settings.lease_ms,
        steadiness=proc.lease.steadiness,
        announce=lambda: proc.bus.do(
            "HSET", proc.keys.models(), settings.served_model_name, builder.info().to_json()
        ),
    )
    return proc.run(worker, worker.stats)


class _Builder:
    """Builds the engine, and describes the model once it is built."""

    def __init__(self, settings: Settings, checkpoint: Checkpoint, config: ModelConfig) -> None:
        self._settings = settings
        self._checkpoint = checkpoint
        self._config = config
        self._defaults = sampling_defaults.choose(
            config.generation_defaults, settings.generation_config, settings.override_generation_config
        )
        self._max_model_len = config.max_position_embeddings
        if settings.max_model_len is not None:
            self._max_model_len = min(settings.max_model_len, self._max_model_len)

    def engine(self) -> Engine:
        """The engine named by the settings; the native one loads its weights here."""
        settings = self._settings
        if settings.engine == "null":
            return NullEngine(
                step_ms=settings.null_step_ms,
                max_num_seqs=settings.max_num_seqs,
                max_model_len=self._max_model_len,
                vocab_size=self._config.vocab_size,
                eos_ids=tuple(self._config.eos_ids),
            )
        bound_spinning()
        # Only here: the null engine runs without torch.
        from workers.engine.loader import build_runner

        log.info("loading weights", path=self._checkpoint.path.name, dtype=settings.dtype)
        runner = build_runner(
            self._checkpoint,
            self._config,
            dtype=settings.dtype,
            max_model_len=self._max_model_len,
            max_num_seqs=settings.max_num_seqs,
            block_size=settings.block_size,
            kv_cache_tokens=settings.kv_cache_tokens,
            progress=_log_progress,
        )
        # A request longer than the whole cache could never run, so none is promised.
        self._max_model_len = min(self._max_model_len, runner.num_blocks * runner.block_size)
        limits = EngineConfig(
            max_model_len=self._max_model_len,
            max_num_seqs=settings.max_num_seqs,
            max_num_batched_tokens=settings.max_num_batched_tokens,
            block_size=settings.block_size,
        )
        return NativeEngine(
            runner,
            config=limits,
            eos_ids=tuple(self._config.eos_ids),
            model_id=f"{settings.served_model_name}:{settings.dtype}",
        )

    def info(self) -> ModelInfo:
        """What the API and the tokenizers must know of the model."""
        return ModelInfo(
            id=self._settings.served_model_name,
            max_model_len=self._max_model_len,
            vocab_size=self._config.vocab_size,
            created=int(self._checkpoint.path.stat().st_mtime),
            aliases=tuple(filter(None, map(str.strip, self._settings.served_model_aliases.split(",")))),
            generation_defaults=self._defaults,
        )


def _log_progress(done: int, total: int) -> None:
    """A line for every quarter of the layers."""
    if done * 4 // total != (done - 1) * 4 // total:
        log.info("loading weights", percent=100 * done // total)
