"""What must be equal for KV cache of two vLLM engines to be interchangeable.

Two kinds of facts, because they cost differently. :func:`describe` reads only
configuration objects and is cheap enough for every process. :func:`weights`
reads the checkpoint (headers and a sample of every tensor) and is called by
rank 0 alone; the leader hands its result to everybody else.

Being too narrow here gives wrong text to a user, being too wide only costs a
cold start, so the attention digest takes the whole effective model
configuration and leaves out what is known not to reach the KV cache.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from vllm.config import VllmConfig

#: Keys of a Hugging Face configuration that cannot change a key or a value
#: vector: bookkeeping, tokenizer ids, sampling defaults and output switches.
_IRRELEVANT = frozenset(
    """
    _name_or_path transformers_version torch_dtype dtype use_cache return_dict
    output_hidden_states output_attentions torchscript tokenizer_class prefix
    bos_token_id eos_token_id pad_token_id sep_token_id decoder_start_token_id
    id2label label2id problem_type finetuning_task task_specific_params
    max_length min_length do_sample early_stopping num_beams num_beam_groups
    diversity_penalty temperature top_k top_p typical_p repetition_penalty
    length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size
    bad_words_ids num_return_sequences output_scores return_dict_in_generate
    forced_bos_token_id forced_eos_token_id remove_invalid_values
    exponential_decay_length_penalty suppress_tokens begin_suppress_tokens
    chunk_size_feed_forward is_decoder cross_attention_hidden_size
    add_cross_attention tie_encoder_decoder pruned_heads tf_legacy_loss
    use_bfloat16 initializer_range
    """.split()
)

#: What vLLM is told about images and the like that reaches what the encoder makes of
#: them. The processor's own configuration is part of the checkpoint.
_MEDIA = (
    "media_io_kwargs",
    "mm_processor_kwargs",
    "mm_device_do_normalize",
    "mm_encoder_attn_dtype",
    "video_pruning_rate",
    "video_pruning_method",
)

#: Files of a checkpoint that say how images and the like are processed.
_PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")

_WEIGHT_SUFFIXES = (".safetensors", ".gguf", ".bin", ".pt", ".pth")

#: One page is read per sampled place.
_SAMPLE_BYTES = 4096
#: Places sampled per file at most. A safetensors file is sampled once in every
#: tensor up to this number, so that a change confined to one layer is seen.
_SAMPLES_PER_FILE = 4096
#: A large tensor is sampled once in so many bytes, and at most so often.
_SAMPLE_EVERY = 4 << 20
_SAMPLES_PER_TENSOR = 16
#: Tables of token embeddings up to this size are sampled in every row: tokens that are
#: added or trained later change a few rows, and nothing else.
_TABLE = re.compile(r"(?:.*[._])?(?:embed_tokens|wte|embed|embeddings?)\.weight")
_TABLE_BYTES = 4 << 30
_ROW_BYTES = 64

#: Load formats whose bytes lie in local files that can be sampled.
_LOCAL_FORMATS = frozenset(
    {
        "auto", "hf", "pt", "safetensors", "mistral", "gguf", "npcache",
        "fastsafetensors", "instanttensor", "bitsandbytes", "sharded_state",
    }
)


@dataclass(frozen=True)
class Identity:
    """The configuration half of a namespace, in the words of its sidecar."""

    model: str
    attention: str
    draft: str
    kv_dtype: str
    kv_scales: str
    quantisation: str
    memory_only: bool = False
    reason: str = ""


@dataclass(frozen=True)
class Weights:
    """The checkpoint half. ``memory_only`` means that nothing may reach disk,
    because another start could not recognise these weights; ``reason`` says why
    in one clause for the log."""

    digest: str
    memory_only: bool = False
    reason: str = ""


def describe(vllm_config: VllmConfig) -> Identity:
    """Returns what the configuration says about the meaning of KV bytes."""
    model = vllm_config.model_config
    dtype = str(model.dtype).removeprefix("torch.")
    cache_dtype = str(vllm_config.cache_config.cache_dtype)
    return Identity(
        model=_model_name(model.model),
        attention=_digest(_attention(vllm_config)),
        draft=_draft(vllm_config),
        kv_dtype=dtype if cache_dtype == "auto" else cache_dtype,
        # Static scales are tensors of the checkpoint and covered by its digest;
        # scales found at run time are refused by the mapping.
        kv_scales="",
        quantisation=str(model.quantization or ""),
    )


def weights(vllm_config: VllmConfig) -> Weights:
    """Returns the digest of the checkpoint that this engine serves.

    The digest covers, per weight file in sorted order: name, size, the
    safetensors header, and sampled pages; never a modification time, so a copy
    or a second download of the same checkpoint keeps its cache. What cannot be
    read gives a random digest and ``memory_only``, and so does what changed after this
    process began: the engine has read it before, and may have read something else."""
    load_format = str(vllm_config.load_config.load_format)
    if load_format == "dummy":
        return _unrecognisable("weights are generated (load_format dummy)")
    if load_format not in _LOCAL_FORMATS:
        return _unrecognisable(f"load format {load_format!r} does not read local files")
    models = [vllm_config.model_config]
    speculative = vllm_config.speculative_config
    if speculative is not None and getattr(speculative, "draft_model_config", None):
        models.append(speculative.draft_model_config)
    h = hashlib.sha256()
    began, changed = started_ns(), None
    try:
        for config in models:
            source = getattr(config, "model_weights", "") or config.model
            files = _weight_files(source, config.revision)
            if not files:
                return _unrecognisable(f"no weight files found for {source!r}")
            for name, path in files:
                _hash_file(h, name, path)
            if config.multimodal_config is not None:
                _hash_processing(h, config)
            changed = changed or _changed_since(began, source, config.revision, [p for _, p in files])
    except (OSError, ValueError) as e:
        return _unrecognisable(f"weights cannot be read ({e})")
    if changed is not None:
        return _unrecognisable(
            f"{changed} changed after this process began, so what the engine has loaded may be "
            "something else; start it again"
        )
    return Weights(h.hexdigest())


def started_ns() -> int:
    """When this process began, in nanoseconds of the clock of files. What is younger than
    that by less than the time that Python takes to start counts as older."""
    try:
        stat = Path("/proc/self/stat").read_bytes()
        ticks = int(stat.rpartition(b")")[2].split()[19])
        booted = time.time_ns() - time.clock_gettime_ns(time.CLOCK_BOOTTIME)
        return booted + ticks * 1_000_000_000 // os.sysconf("SC_CLK_TCK") + _PYTHON_NS
    except (OSError, ValueError, IndexError, AttributeError):
        return _IMPORTED_NS


#: Covers the 10 ms in which the kernel counts, and a clock that was set a little.
_PYTHON_NS = 100_000_000
_IMPORTED_NS = time.time_ns()


def _changed_since(began: int, source: str, revision: str | None, files: list[Path]) -> Path | None:
    """A file of the checkpoint, a link on the way to it, or its directory, that changed
    after ``began``; also when an older one was put in its place by a rename."""
    root = Path(source).absolute()
    if root.exists():
        links = [p for p in (root, *root.parents) if p.is_symlink()]
        watched = [root, *files]
        stats = [(p, p.stat()) for p in watched] + [(p, p.lstat()) for p in [*links, *files]]
        return next((p for p, st in stats if st.st_ctime_ns > began), None)
    # A file of the hub's cache is named by its content, and may have been downloaded by
    # this engine. But a branch may have gone on since.
    snapshot = next(p for p in files[0].parents if p.parent.name == "snapshots")
    branch = snapshot.parent.parent / "refs" / (revision or "main")
    others = any(p != snapshot for p in snapshot.parent.iterdir())
    return branch if others and branch.exists() and branch.stat().st_ctime_ns > began else None


def _unrecognisable(reason: str) -> Weights:
    return Weights(secrets.token_hex(32), memory_only=True, reason=reason)


def _model_name(model: str) -> str:
    # A directory may be moved or mounted elsewhere; the checkpoint's digest
    # tells models apart, the name is for people.
    return os.path.basename(os.path.normpath(model)) if os.path.isdir(model) else model


def _attention(vllm_config: VllmConfig) -> dict[str, Any]:
    model = vllm_config.model_config
    config = _relevant(model.hf_config.to_dict())
    facts: dict[str, Any] = {
        "hf_config": config,
        "dtype": str(model.dtype),
        "disable_sliding_window": bool(model.disable_sliding_window),
    }
    media = model.multimodal_config
    if media is not None:
        facts["media"] = {name: getattr(media, name) for name in _MEDIA}
    # Rope variants that pick their factors by the longest sequence make the
    # configured length part of every key vector.
    if _length_dependent_rope(config):
        facts["max_model_len"] = model.max_model_len
    return facts


def _relevant(config: Any) -> Any:
    if isinstance(config, dict):
        return {k: _relevant(v) for k, v in config.items() if k not in _IRRELEVANT}
    if isinstance(config, (list, tuple)):
        return [_relevant(v) for v in config]
    return config


def _length_dependent_rope(config: Any) -> bool:
    if isinstance(config, dict):
        kind = config.get("rope_type", config.get("type"))
        if kind in ("longrope", "su", "dynamic"):
            return True
        return any(_length_dependent_rope(v) for v in config.values())
    return False


def has_draft_layers(vllm_config: VllmConfig) -> bool:
    """Whether the KV cache holds layers of a draft, whose last row of a chunk depends
    on the token after it: keys then name that token."""
    speculative = vllm_config.speculative_config
    return speculative is not None and speculative.uses_draft_kv_cache()


def _draft(vllm_config: VllmConfig) -> str:
    if not has_draft_layers(vllm_config):
        return ""
    speculative = vllm_config.speculative_config
    draft = speculative.draft_model_config
    facts = {"method": speculative.method, "hf_config": _relevant(draft.hf_config.to_dict())}
    return f"{speculative.method}:{_model_name(draft.model)}:{_digest(facts)[:16]}"


def _digest(facts: dict[str, Any]) -> str:
    text = json.dumps(facts, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def _directory(source: str, revision: str | None) -> Path:
    path = Path(source)
    if path.is_dir():
        return path
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return Path(snapshot_download(source, revision=revision, local_files_only=True))
    except LocalEntryNotFoundError as e:
        raise OSError(f"{source!r} is not in the local cache") from e


def _weight_files(source: str, revision: str | None) -> list[tuple[str, Path]]:
    path = Path(source)
    if path.is_file():
        return [(path.name, path)]
    path = _directory(source, revision)
    files = [p for p in path.rglob("*") if p.suffix in _WEIGHT_SUFFIXES and p.is_file()]
    # The same tensors are often shipped twice; vLLM prefers safetensors.
    preferred = [p for p in files if p.suffix == ".safetensors"] or files
    return sorted((p.relative_to(path).as_posix(), p) for p in preferred)


def _hash_processing(h: Any, config: Any) -> None:
    """What vLLM hashes as an image is the file that the caller sent, not what the
    processor makes of it."""
    where = Path(config.model)
    where = where.parent if where.is_file() else _directory(config.model, config.revision)
    files = {name: where / name for name in _PROCESSOR_FILES}
    scales = config.multimodal_config.mm_encoder_fp8_scale_path
    if scales:
        files["mm_encoder_fp8_scale_path"] = Path(scales)
    for name, path in files.items():
        if path.exists():
            hash_text(h, name)
            hash_text(h, json.dumps(json.loads(path.read_bytes()), sort_keys=True))


def hash_text(h: Any, text: str) -> None:
    """Hashes a text with its length before it, so that it cannot be taken for a part of
    another one."""
    encoded = text.encode()
    h.update(struct.pack("<Q", len(encoded)) + encoded)


def _hash_file(h: Any, name: str, path: Path) -> None:
    with open(path, "rb") as f:
        size = os.fstat(f.fileno()).st_size
        encoded = name.encode()
        h.update(struct.pack("<IQ", len(encoded), size) + encoded)
        places: Iterator[int]
        if path.suffix == ".safetensors":
            header, tensors = _safetensors(f, size)
            h.update(header)
            for t in tensors:
                if t.rows and t.end - t.begin <= _TABLE_BYTES:
                    _hash_rows(h, f, t)
            places = _tensor_places(tensors)
        else:
            places = _even_places(size)
        for place in places:
            f.seek(place)
            h.update(struct.pack("<Q", place) + f.read(_SAMPLE_BYTES))


class _Tensor(NamedTuple):
    begin: int  # in the file
    end: int
    rows: int  # of a table of embeddings; else 0


def _safetensors(f: Any, size: int) -> tuple[bytes, list[_Tensor]]:
    """The header of a file and its tensors in order."""
    prefix = f.read(8)
    if len(prefix) < 8:
        raise ValueError(f"{f.name} is too short for a safetensors file")
    (length,) = struct.unpack("<Q", prefix)
    if length > size - 8:
        raise ValueError(f"{f.name} has a damaged safetensors header")
    header = f.read(length)
    tensors = []
    for name, tensor in json.loads(header).items():
        if name != "__metadata__":
            begin, end = (8 + length + x for x in tensor["data_offsets"])
            shape = tensor["shape"]
            is_table = len(shape) == 2 and shape[0] > 0 and _TABLE.fullmatch(name)
            tensors.append(_Tensor(begin, end, shape[0] if is_table else 0))
    return header, sorted(tensors)


def _tensor_places(tensors: list[_Tensor]) -> Iterator[int]:
    """The middle of every tensor, of large ones the middles of equal parts."""
    step = max(1, -(-len(tensors) // _SAMPLES_PER_FILE))
    sampled = tensors[::step]
    most = max(1, min(_SAMPLES_PER_TENSOR, _SAMPLES_PER_FILE // max(1, len(sampled))))
    for begin, end, _ in sampled:
        n = min(most, max(1, (end - begin) // _SAMPLE_EVERY))
        for i in range(n):
            middle = begin + (end - begin) * (2 * i + 1) // (2 * n)
            yield max(begin, middle - _SAMPLE_BYTES // 2)


def _hash_rows(h: Any, f: Any, t: _Tensor) -> None:
    """A few bytes from the middle of every row of a table."""
    row = (t.end - t.begin) // t.rows
    if not row:
        return
    a = max(0, (row - _ROW_BYTES) // 2)
    f.seek(t.begin)
    left, at_once = t.rows, max(1, (8 << 20) // row)
    while left:
        n = min(left, at_once)
        rows = np.frombuffer(f.read(n * row), np.uint8).reshape(n, row)
        h.update(np.ascontiguousarray(rows[:, a : a + _ROW_BYTES]))
        left -= n


def _even_places(size: int) -> Iterator[int]:
    count = min(_SAMPLES_PER_FILE, max(1, -(-size // _SAMPLE_BYTES)))
    last = max(0, size - _SAMPLE_BYTES)
    return (last * i // max(1, count - 1) for i in range(count))
