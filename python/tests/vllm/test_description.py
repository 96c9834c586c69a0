"""What tells engines apart: one field of vLLM's real configuration at a time, and one
change of a checkpoint at a time."""

import copy
import json
import os
import subprocess
import sys
import time

import models
import pytest
import torch
from safetensors.torch import save_file
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    ModelConfig,
    MultiModalConfig,
    ParallelConfig,
    SchedulerConfig,
    SpeculativeConfig,
    VllmConfig,
)

from kvtier.vllm import identity

#: Elsewhere in these tests an engine begins when it is asked for.
REAL_STARTED_NS = identity.started_ns


def model_config(path, **kw):
    return ModelConfig(
        model=str(path), skip_tokenizer_init=True, dtype="bfloat16", max_model_len=1024, enforce_eager=True, **kw
    )


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    path = models.write(tmp_path_factory.mktemp("description"), "llama", weights=True)
    return VllmConfig(
        model_config=model_config(path),
        parallel_config=ParallelConfig(),
        cache_config=CacheConfig(block_size=16),
        scheduler_config=SchedulerConfig(
            max_num_seqs=4, max_num_batched_tokens=1024, max_model_len=1024, is_encoder_decoder=False
        ),
        device_config=DeviceConfig("cpu"),
    )


@pytest.fixture
def config(original):
    """To be changed by a test."""
    return copy.deepcopy(original)


def hf(**changes):
    def change(config):
        config.model_config.hf_config.update(changes)

    return change


def setting(path, value):
    def change(config):
        *names, last = path.split(".")
        for name in names:
            config = getattr(config, name)
        assert hasattr(config, last)
        setattr(config, last, value)

    return change


def media(**kw):
    return setting("model_config.multimodal_config", MultiModalConfig(**kw))


def every(*changes):
    def change(config):
        for c in changes:
            c(config)

    return change


def describe(config, change):
    config = copy.deepcopy(config)
    change(config)
    return identity.describe(config)


def rope(kind):
    return hf(rope_parameters={"rope_type": kind, "rope_theta": 10000.0, "factor": 2.0})


LONGER = setting("model_config.max_model_len", 2048)

#: Pairs of configurations whose KV is not the same, by what tells them apart.
DIFFERENT = {
    "kv dtype": ("kv_dtype", every(), setting("cache_config.cache_dtype", "fp8_e4m3")),
    "kind of fp8": (
        "kv_dtype",
        setting("cache_config.cache_dtype", "fp8_e4m3"),
        setting("cache_config.cache_dtype", "fp8_e5m2"),
    ),
    "dtype": ("kv_dtype", every(), setting("model_config.dtype", torch.float16)),
    "dtype of the model, not of the cache": (
        "attention",
        setting("cache_config.cache_dtype", "fp8_e4m3"),
        every(
            setting("cache_config.cache_dtype", "fp8_e4m3"), setting("model_config.dtype", torch.float16)
        ),
    ),
    "quantisation": ("quantisation", every(), setting("model_config.quantization", "fp8")),
    "kind of quantisation": (
        "quantisation",
        setting("model_config.quantization", "awq"),
        setting("model_config.quantization", "fp8"),
    ),
    "theta": ("attention", every(), hf(rope_parameters={"rope_type": "default", "rope_theta": 5000.0})),
    "kind of rope": ("attention", rope("linear"), rope("dynamic")),
    "factor of rope": (
        "attention",
        rope("linear"),
        hf(rope_parameters={"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}),
    ),
    **{
        f"length under {kind} rope": ("attention", rope(kind), every(rope(kind), LONGER))
        for kind in ("dynamic", "longrope")
    },
    "length under rope of a part": (
        "attention",
        hf(text_config={"rope_scaling": {"type": "su"}}),
        every(hf(text_config={"rope_scaling": {"type": "su"}}), LONGER),
    ),
    "epsilon": ("attention", every(), hf(rms_norm_eps=1e-6)),
    "layers": ("attention", every(), hf(num_hidden_layers=3)),
    "window": ("attention", every(), hf(sliding_window=512)),
    "window off": ("attention", every(), setting("model_config.disable_sliding_window", True)),
    "a field that nobody knows yet": ("attention", every(), hf(new_kind_of_gate=True)),
    "arguments of the processor": (
        "attention",
        media(),
        media(mm_processor_kwargs={"num_crops": 4}),
    ),
    "another argument of the processor": (
        "attention",
        media(mm_processor_kwargs={"num_crops": 16}),
        media(mm_processor_kwargs={"num_crops": 4}),
    ),
    "reading of media": ("attention", media(), media(media_io_kwargs={"video": {"num_frames": 40}})),
    "normalisation": ("attention", media(), media(mm_device_do_normalize=False)),
    "dtype of the encoder": ("attention", media(), media(mm_encoder_attn_dtype="fp8")),
    "pruning": ("attention", media(), media(video_pruning_rate=0.5)),
    "kind of pruning": (
        "attention",
        media(video_pruning_rate=0.5),
        media(video_pruning_rate=0.5, video_pruning_method="vidcom2"),
    ),
}

#: Changes after which the same KV is found.
EQUAL = {
    "nothing": every(),
    "tokens": hf(bos_token_id=7, eos_token_id=8),
    "dtype in the file": hf(torch_dtype="float32"),
    "name": hf(_name_or_path="elsewhere"),
    "length": LONGER,
    "dtype of the cache, as before": setting("cache_config.cache_dtype", "bfloat16"),
    "blocks": setting("cache_config.block_size", 32),
}


@pytest.mark.parametrize("what", DIFFERENT)
def test_one_field_tells_engines_apart(config, what):
    field, one, other = DIFFERENT[what]
    a, b = describe(config, one), describe(config, other)
    assert getattr(a, field) != getattr(b, field)
    assert not a.memory_only and not b.memory_only


@pytest.mark.parametrize("what", EQUAL)
def test_what_does_not_change_kv_keeps_the_cache(config, what):
    assert describe(config, EQUAL[what]) == identity.describe(config)


def test_room_for_processed_images_does_not_matter(config):
    assert describe(config, media(mm_processor_cache_gb=1)) == describe(config, media())


def test_hf_overrides_are_in_the_description(config, tmp_path):
    path = models.write(tmp_path, "llama")
    plain = identity.describe(config)
    config.model_config = model_config(path)
    assert identity.describe(config) == plain, "the same model elsewhere"
    config.model_config = model_config(path, hf_overrides={"rms_norm_eps": 1e-3})
    assert identity.describe(config).attention != plain.attention


def test_the_draft_is_in_the_description(config, tmp_path):
    """Only where it has layers of its own in the cache."""
    plain = identity.describe(config)
    assert plain.draft == "" and not identity.has_draft_layers(config)

    def with_draft(name, **changes):
        path = models.write(tmp_path / name, "llama")
        content = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps(content | changes))
        c = copy.deepcopy(config)
        c.speculative_config = SpeculativeConfig(
            model=str(path),
            method="draft_model",
            num_speculative_tokens=2,
            target_model_config=c.model_config,
            target_parallel_config=c.parallel_config,
        )
        assert identity.has_draft_layers(c)
        return identity.describe(c).draft

    one = with_draft("one")
    assert one and one == with_draft("one")
    assert one != with_draft("two", num_hidden_layers=2)
    config.speculative_config = SpeculativeConfig(method="ngram", num_speculative_tokens=2, prompt_lookup_max=3)
    assert identity.describe(config) == plain


# ---- the checkpoint


def digest(config):
    found = identity.weights(config)
    assert not found.memory_only, found.reason
    return found.digest


def test_processing_of_images_is_part_of_the_checkpoint(config, tmp_path):
    path = models.write(tmp_path, "llama", weights=True)
    config.model_config.model = str(path)
    text_only = digest(config)
    for name in ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json"):
        (path / name).write_text("{}")
    assert digest(config) == text_only, "a model of text alone does not process images"
    config.model_config.multimodal_config = MultiModalConfig()
    seen = {digest(config)}
    for name in ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json"):
        for content in ('{"image_mean": [0, 0, 0], "size": 4}', '{"image_mean": [0, 0, 1], "size": 4}'):
            (path / name).write_text(content)
            seen.add(digest(config))
    assert len(seen) == 7
    (path / name).write_text('{ "size": 4,\n"image_mean": [0,0,1] }')
    assert digest(config) in seen, "it says the same"
    scales = tmp_path / "scales.json"
    scales.write_text("[0]")
    config.model_config.multimodal_config = MultiModalConfig(
        mm_encoder_attn_dtype="fp8", mm_encoder_fp8_scale_path=str(scales)
    )
    for content in ("[1]", "[2]"):
        scales.write_text(content)
        seen.add(digest(config))
    assert len(seen) == 9


def table(name="model.embed_tokens.weight", rows=1000, columns=96):
    """A checkpoint of one tensor in two shapes of the same bytes."""
    return {name: torch.arange(rows * columns, dtype=torch.int32).view(rows, columns)}


@pytest.mark.parametrize(
    "name, row, seen",
    [
        ("model.embed_tokens.weight", 3, True),
        ("language_model.model.embed_tokens.weight", 998, True),
        ("transformer.wte.weight", 500, True),
        ("word_embeddings.weight", 40, True),
        ("tok_embeddings.weight", 40, True),
        ("model.layers.0.mlp.up_proj.weight", 500, True),  # where it is sampled
        ("lm_head.weight", 3, False),  # reaches no KV, and a row of it is not looked for
    ],
)
def test_a_row_of_the_embeddings_is_seen(config, tmp_path, name, row, seen):
    config.model_config.model = str(models.write(tmp_path, "llama"))
    at = tmp_path / "llama" / "model.safetensors"
    before = table(name)
    save_file(before, at)
    one = digest(config)
    assert one == digest(config)
    before[name][row] += 1
    save_file(before, at)
    assert (digest(config) != one) == seen


def test_a_large_tensor_is_sampled_in_many_places(config, tmp_path, monkeypatch):
    """But no file in more than the bound, however many tensors it has."""
    config.model_config.model = str(models.write(tmp_path, "llama"))
    at = tmp_path / "llama" / "model.safetensors"
    monkeypatch.setattr(identity, "_SAMPLE_EVERY", 64 << 10)
    content = table("model.layers.0.mlp.up_proj.weight", 1024, 256)  # 1 MiB
    save_file(content, at)
    seen = {digest(config)}
    flat = content["model.layers.0.mlp.up_proj.weight"].view(-1)
    for part in range(16):
        middle = (2 * part + 1) * len(flat) // 32
        flat[middle] += 1
        save_file(content, at)
        seen.add(digest(config))
        flat[middle] -= 1
    assert len(seen) == 17
    places = list(identity._tensor_places([identity._Tensor(i << 30, (i + 1) << 30, 0) for i in range(10000)]))
    assert len(places) <= identity._SAMPLES_PER_FILE
    places = list(identity._tensor_places([identity._Tensor(i << 30, (i + 1) << 30, 0) for i in range(1000)]))
    assert 1000 <= len(places) <= identity._SAMPLES_PER_FILE


def test_the_start_of_this_process():
    """Against what ps computes."""
    age_s = int(subprocess.run(["ps", "-o", "etimes=", "-p", str(os.getpid())], capture_output=True).stdout)
    began = REAL_STARTED_NS()
    assert abs((time.time_ns() - began) / 1e9 - age_s) < 3
    child = f"import runpy; print(runpy.run_path({identity.__file__!r})['started_ns']())"
    before = time.time_ns()
    out = subprocess.run([sys.executable, "-c", child], capture_output=True, text=True, check=True).stdout
    assert before <= int(out) <= time.time_ns()


def write(path, n=0):
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(table(rows=10 + n), path)


def swap_file(d):
    write(d / "model.safetensors", 1)


def older_file(d):
    os.utime(d / "new.safetensors", ns=(1, 1))
    os.rename(d / "new.safetensors", d / "model.safetensors")


def swap_directory(d):
    os.rename(d, d.parent / "old")
    os.rename(d.parent / "other", d)


def swap_link(d):
    (d.parent / "link.new").symlink_to(d.parent / "other")
    os.rename(d.parent / "link.new", d.parent / "link")


@pytest.mark.parametrize(
    "change, served",
    [(swap_file, "model"), (older_file, "model"), (swap_directory, "model"), (swap_link, "link")],
)
def test_weights_that_change_during_the_start_stay_in_memory(config, tmp_path, monkeypatch, change, served):
    """The engine has loaded what was there before, or what is there now."""
    d = tmp_path / "model"
    for path in (d / "model.safetensors", d / "new.safetensors", tmp_path / "other" / "model.safetensors"):
        write(path, len(str(path)))
    (tmp_path / "link").symlink_to(d)
    config.model_config.model = str(tmp_path / served)
    began = later(tmp_path)
    monkeypatch.setattr(identity, "started_ns", lambda: began)
    digest(config)
    change(d)
    found = identity.weights(config)
    assert found.memory_only and found.digest != identity.weights(config).digest
    assert str(tmp_path) in found.reason and "changed after this process began" in found.reason
    began = later(tmp_path)
    digest(config)


def later(directory):
    """A time that every file has before it, and none that is written from now on."""
    probe = directory.parent / f"{directory.name}.probe"

    def stamp():
        probe.write_bytes(b"x")
        return probe.stat().st_ctime_ns

    first = stamp()
    while (now := stamp()) <= first:
        time.sleep(0.001)
    return now - 1


def test_a_model_that_the_engine_downloaded_itself(config, tmp_path, monkeypatch):
    """Names in the hub's cache say the content; only a branch may go on."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    began = later(tmp_path)
    monkeypatch.setattr(identity, "started_ns", lambda: began)
    repo = tmp_path / "models--some--model"
    one, two = "1" * 40, "2" * 40
    write(repo / "snapshots" / one / "model.safetensors")
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(one)
    config.model_config.model, config.model_config.revision = "some/model", None
    first = digest(config)
    write(repo / "snapshots" / two / "model.safetensors", 1)
    (repo / "refs" / "main").write_text(two)
    found = identity.weights(config)
    assert found.memory_only and "refs/main changed" in found.reason
    config.model_config.revision = one
    assert digest(config) == first
    config.model_config.revision = None
    began = later(tmp_path)
    assert digest(config) != first
