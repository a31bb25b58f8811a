"""Checkpoints: exact round trip of every tensor, and one clear error, nothing half-written, for every bad input."""

import dataclasses
import errno
import json
import logging
import os
import shutil
import struct
from pathlib import Path

import pytest
import torch
from models import GOLDENS, random_tokens, tiny_config, tiny_model
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from perilune import Error, ModelConfig, Sequences, Transformer, sizes
from perilune.config import QuantConfig
from perilune.config_hf import mxfp4_quantization_config
from perilune.model import checkpoint, initialize, load, outline, places_of, reading, save
from perilune.model.names import entries


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {name: value for path in sorted(folder.glob("*.safetensors")) for name, value in load_file(path).items()}


def same_weights(a: Transformer, b: Transformer) -> bool:
    left, right = a.state_dict(), b.state_dict()
    return left.keys() == right.keys() and all(torch.equal(left[k], right[k]) for k in left)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the golden checkpoint (three shards and an index) that a test may damage."""
    shutil.copytree(GOLDENS / "k3-tiny", tmp_path / "ckpt")
    (tmp_path / "ckpt" / "golden.safetensors").unlink()
    return tmp_path / "ckpt"


@pytest.mark.parametrize("family", ["kimi_k3", "kimi_linear"])
@pytest.mark.parametrize("limit", [10**9, 100_000])
def test_save_then_load_gives_the_same_bits(family: str, limit: int, tmp_path: Path) -> None:
    model = tiny_model(family)
    save(model, tmp_path / "out", max_shard_bytes=limit)
    again = load(tmp_path / "out")
    assert same_weights(model, again)
    assert again.config.to_hf() == model.config.to_hf() | again.config.to_hf()
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_every_parameter_is_covered_exactly_once() -> None:
    for family in ("kimi_k3", "kimi_linear"):
        model = Transformer(tiny_config(family))
        count = {name: torch.zeros(p.shape) for name, p in (*model.named_parameters(), *model.named_buffers())}
        for entry in entries(model.config):
            (place,) = places_of(count, entry)
            place.add_(1)
        assert all((c == 1).all() for c in count.values())


@pytest.mark.parametrize(
    "preset",
    ["nano", "mini", *(pytest.param(big, marks=pytest.mark.slow) for big in ("kimi-linear-48b-a3b", "kimi-k3"))],
)
def test_the_names_of_a_preset_are_its_parameters(preset: str) -> None:
    """Every value of every parameter has one name in the file, and there are as many names as the sizes room counts."""
    config = ModelConfig.from_pretrained(preset)
    model = outline(config)
    numbers = {name: value.numel() for name, value in (*model.named_parameters(), *model.named_buffers())}
    filled, places, names = dict.fromkeys(numbers, 0), set(), set()
    table = list(entries(config))
    for entry in table:
        filled[entry.param] += entry.valid or torch.Size(entry.shape).numel()
        places.add((entry.param, entry.index, entry.rows))
        names.update(entry.stored())
    assert filled == numbers
    assert len(places) == len(table)
    vision = sum(tensor.stored for tensor in sizes.tensors(config) if tensor.component.startswith("vision"))
    assert len(names) == sizes.count(config).tensors - vision


def test_released_names_and_dtypes_are_kept(tmp_path: Path) -> None:
    model = load(GOLDENS / "k3-tiny")
    save(model, tmp_path / "out")
    before, after = tensors(GOLDENS / "k3-tiny"), tensors(tmp_path / "out")
    del before["logits"], before["input_ids"]
    assert before.keys() == after.keys()
    for name, value in before.items():
        assert after[name].shape == value.shape, name
        assert after[name].dtype == value.dtype, name
        if not name.endswith(("_packed", "_scale")):
            assert torch.equal(after[name], value), name


def test_packed_experts_keep_their_values(tmp_path: Path) -> None:
    model = load(GOLDENS / "k3-eps")
    save(model, tmp_path / "out")
    assert same_weights(model, load(tmp_path / "out"))


def test_float32_tensors_stay_float32(tmp_path: Path) -> None:
    model = load(GOLDENS / "k3-tiny", dtype=torch.bfloat16)
    kinds = {name: p.dtype for name, p in (*model.named_parameters(), *model.named_buffers())}
    kept = {n for n, kind in kinds.items() if kind == torch.float32}
    assert kept == {n for n in kinds if n.endswith(("conv_CW", "A_log_H", "dt_bias_HK", "o_norm_K", "bias_E"))}
    assert load(GOLDENS / "k3-tiny", dtype=torch.float64).layers[0].attn.A_log_H.dtype == torch.float64


def test_quantised_copy_of_a_dense_model(tmp_path: Path) -> None:
    model = tiny_model()
    config = dataclasses.replace(model.config, quant=QuantConfig("mxfp4-pack-quantized", 32, "even"))
    packed = Transformer(dataclasses.replace(config, hf_present=None, hf_extra={}))
    packed.load_state_dict(model.state_dict())
    save(packed, tmp_path / "out")
    again = load(tmp_path / "out", dtype=torch.float32)
    assert again.config.quant.hf == mxfp4_quantization_config()
    error = (again.layers[1].ffn.gate_up_E2FL - model.layers[1].ffn.gate_up_E2FL).norm()
    relative = error / model.layers[1].ffn.gate_up_E2FL.norm()
    assert 0.08 < relative < 0.13, relative  # MXFP4 of Gaussian weights: 11.2 %


def test_index_and_sizes(tmp_path: Path) -> None:
    save(tiny_model(), tmp_path / "out", max_shard_bytes=100_000)
    index = json.loads((tmp_path / "out" / checkpoint.INDEX).read_text())
    stored = tensors(tmp_path / "out")
    assert index["weight_map"].keys() == stored.keys()
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in stored.values())
    shards = sorted(set(index["weight_map"].values()))
    assert len(shards) > 3
    assert all((tmp_path / "out" / shard).stat().st_size < 200_000 for shard in shards)


def test_replacing_a_folder_keeps_its_other_files(tmp_path: Path) -> None:
    out = tmp_path / "out"
    save(tiny_model(seed=1), out, max_shard_bytes=100_000)
    kept = ("model_card.md", "modeling_own.py", "tokenizer.json")
    for name in kept:
        (out / name).write_text(name)
    (out / "model_notes").mkdir()
    (out / "dangling").symlink_to("nowhere")
    save(tiny_model(seed=2), out)
    assert all((out / name).read_text() == name for name in kept)
    assert same_weights(load(out), tiny_model(seed=2))
    others = {"config.json", "model.safetensors", "model_notes", "dangling"}
    assert {p.name for p in out.iterdir()} == others | set(kept)
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def small_model(seed: int) -> Transformer:
    """Two layers, of which one has experts."""
    config = tiny_config("kimi_linear")
    kda, mla = dataclasses.replace(config.kda, layers=(0,)), dataclasses.replace(config.mla, layers=(1,))
    return initialize(Transformer(dataclasses.replace(config, num_layers=2, kda=kda, mla=mla)), seed)


def test_other_files_are_left_alone_not_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder may hold a run's files, be the working directory, or be where a volume is mounted."""
    (tmp_path / "steps").mkdir()
    (tmp_path / "log").write_text("1")
    monkeypatch.chdir(tmp_path)
    with open("log", "a") as log:
        before = [path.stat().st_ino for path in (tmp_path, tmp_path / "steps", tmp_path / "log")]
        save(small_model(1), ".")
        save(small_model(2), ".")
        log.write("2")
    assert before == [path.stat().st_ino for path in (tmp_path, tmp_path / "steps", tmp_path / "log")]
    assert Path("log").read_text() == "12"
    assert same_weights(load("."), small_model(2))


def test_two_writers_of_one_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second is refused before it writes; the first is not disturbed."""
    out, write = tmp_path / "out", checkpoint._write

    def begin_another(model: Transformer, folder: Path, limit: int) -> None:
        monkeypatch.setattr(checkpoint, "_write", write)
        with pytest.raises(Error, match="is being written by someone else"):
            save(small_model(2), out)
        write(model, folder, limit)

    monkeypatch.setattr(checkpoint, "_write", begin_another)
    save(small_model(1), out)
    assert same_weights(load(out), small_model(1))
    assert {path.name for path in out.iterdir()} == {"config.json", "model.safetensors"}


@pytest.mark.parametrize("old", [False, True])
def test_a_writer_that_is_killed_leaves_a_whole_checkpoint_or_none(old: bool, tmp_path: Path) -> None:
    """At every file that it writes and every move that it makes; the next writer clears up."""
    one, two = small_model(1), small_model(2)
    seen = set[str]()
    save(one, tmp_path / "one", max_shard_bytes=60_000)
    for step in range(1, 100):
        out = tmp_path / str(step)
        if old:
            shutil.copytree(tmp_path / "one", out)
        child = os.fork()
        if child == 0:
            die_at(step)
            save(two, out)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if status == 0:
            assert same_weights(load(out), two)
            break
        if (out / "config.json").exists():
            assert same_weights(load(out), one)
            seen.add("one")
        else:
            with pytest.raises(Error, match=r"nor a folder with config\.json"):
                load(out)
            seen.add("none")
    for out in (tmp_path / "1", tmp_path / str(step - 1)):
        save(two, out)
        assert {path.name for path in out.iterdir()} == {"config.json", "model.safetensors"}
    assert step > 6
    assert seen == ({"none", "one"} if old else {"none"})


def die_at(step: int) -> None:
    """End this process, as a kill does, before its so-many-eth write or move."""
    left = [step]

    def counted(inner):
        def call(*arguments, **options):
            left[0] -= 1
            if left[0] == 0:
                os._exit(9)
            return inner(*arguments, **options)

        return call

    checkpoint.save_file = counted(checkpoint.save_file)
    for name in ("write_text", "rename", "chmod"):
        setattr(Path, name, counted(getattr(Path, name)))


def test_a_checkpoint_replaced_while_it_is_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shards of two checkpoints never make one model."""
    out, opened = tmp_path / "out", []
    save(small_model(1), out, max_shard_bytes=20_000)

    def replace_after_first(path: Path, framework: str) -> object:
        opened.append(path)
        if len(opened) == 2:
            save(small_model(2), out, max_shard_bytes=20_000)
        return safe_open(path, framework=framework)

    monkeypatch.setattr(reading, "safe_open", replace_after_first)
    with pytest.raises(Error, match="was replaced while it was read"):
        load(out)
    assert len(opened) > 2
    assert same_weights(load(out), small_model(2))


def test_a_link_is_followed(tmp_path: Path) -> None:
    save(tiny_model(seed=1), tmp_path / "real")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    save(tiny_model(seed=2), tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert same_weights(load(tmp_path / "real"), tiny_model(seed=2))


def test_packed_copy_of_a_float32_model_runs(tmp_path: Path) -> None:
    model = tiny_model()
    model.config = dataclasses.replace(model.config, quant=QuantConfig("mxfp4-pack-quantized", 32, "even"))
    save(model, tmp_path / "out")
    again = load(tmp_path / "out")
    assert {p.dtype for p in again.parameters()} == {torch.float32}
    assert again(torch.arange(5), Sequences.from_lengths([5])).isfinite().all()


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.float8_e4m3fn])
def test_weights_of_a_foreign_dtype_are_refused(dtype: torch.dtype, folder: Path) -> None:
    edit_tensor(folder, LAYER + "self_attn.q_proj.weight", lambda t: t.to(dtype))
    with pytest.raises(Error, match=r"q_proj.weight has dtype .*; must be one of"):
        load(folder)


@pytest.mark.parametrize("old", [False, True])
def test_full_disk_leaves_what_was_there(old: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"
    if old:
        save(tiny_model(seed=1), out)
    before = sorted(tmp_path.rglob("*"))
    calls = []

    def full(tensors: dict, path: Path, metadata: dict) -> None:
        calls.append(path)
        if len(calls) == 2:
            path.write_bytes(b"half")
            raise OSError(errno.ENOSPC, "No space left on device")
        save_file(tensors, path, metadata=metadata)

    monkeypatch.setattr(checkpoint, "save_file", full)
    with pytest.raises(Error, match="No space left on device"):
        save(tiny_model(seed=2), out, max_shard_bytes=100_000)
    assert len(calls) == 2
    assert sorted(tmp_path.rglob("*")) == before
    assert not old or same_weights(load(out), tiny_model(seed=1))


@pytest.mark.parametrize("failing", [1, 2, 3, 4])
def test_a_rename_that_fails_leaves_the_old_checkpoint(
    failing: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, rename, calls = tmp_path / "out", Path.rename, []
    save(tiny_model(seed=1), out)

    def fail(self: Path, target: Path) -> Path:
        calls.append(target)
        if len(calls) == failing:
            raise OSError(errno.EBUSY, "Device or resource busy")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", fail)
    with pytest.raises(Error, match="busy"):
        save(tiny_model(seed=2), out)
    assert same_weights(load(out), tiny_model(seed=1))
    assert {path.name for path in out.iterdir()} == {"config.json", "model.safetensors"}


def test_vision_tensors_are_skipped_and_counted(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_file({f"vision_tower.x{i}": torch.zeros(1) for i in range(3)}, folder / "vision.safetensors")
    edit_index(folder, {f"vision_tower.x{i}": "vision.safetensors" for i in range(3)})
    with caplog.at_level(logging.WARNING):
        load(folder)
    assert "3 vision tensors" in caplog.text


def edit_index(folder: Path, added: dict[str, str | None]) -> None:
    path = folder / checkpoint.INDEX
    index = json.loads(path.read_text())
    for name, shard in added.items():
        if shard is None:
            del index["weight_map"][name]
        else:
            index["weight_map"][name] = shard
    path.write_text(json.dumps(index))


def edit_tensor(folder: Path, name: str, change) -> None:
    shard = folder / json.loads((folder / checkpoint.INDEX).read_text())["weight_map"][name]
    content = load_file(shard)
    content[name] = change(content[name])
    save_file(content, shard)


LAYER = "language_model.model.layers.1."
EXPERT = LAYER + "block_sparse_moe.experts.0.w1.weight"


def truncate(folder: Path) -> None:
    path = folder / "model-00002-of-000003.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])


SHARD = "model-00001-of-000003.safetensors"


def lie_about_header(folder: Path, size: int) -> None:
    path = folder / SHARD
    path.write_bytes(struct.pack("<Q", size) + path.read_bytes()[8:])


def edit_header(folder: Path, **fields: object) -> None:
    """Change what the shard says about its first tensor."""
    path = folder / SHARD
    data = path.read_bytes()
    end = 8 + struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8:end])
    header[next(name for name in header if name != "__metadata__")] |= fields
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data[end:])


def edit_config(folder: Path, **fields: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["text_config"] |= fields
    (folder / "config.json").write_text(json.dumps(config))


def store_twice(folder: Path) -> None:
    """The dense MLP also under the name that transformers gives it."""
    value = load_file(folder / SHARD)[DENSE]
    other = DENSE.replace(".mlp.", ".block_sparse_moe.")
    save_file({other: value + 1}, folder / "more.safetensors")
    edit_index(folder, {other: "more.safetensors"})


DENSE = "language_model.model.layers.0.mlp.gate_proj.weight"
DAMAGE = {
    "truncated": (truncate, "truncated"),
    "garbage": (lambda f: (f / "model-00001-of-000003.safetensors").write_bytes(b"\0" * 40), "damaged"),
    "absent shard": (lambda f: (f / "model-00003-of-000003.safetensors").unlink(), "model-00003"),
    "absent tensor": (lambda f: edit_index(f, {"ghost.weight": "model-00001-of-000003.safetensors"}), "ghost.weight"),
    "missing": (lambda f: edit_index(f, {LAYER + "input_layernorm.weight": None}), r"1 missing: .*input_layernorm"),
    "no index": (lambda f: (f / checkpoint.INDEX).unlink(), "neither"),
    "bad index": (lambda f: (f / checkpoint.INDEX).write_text("[]"), "not an index"),
    "no config": (lambda f: (f / "config.json").unlink(), r"config\.json"),
    "scale shape": (
        lambda f: edit_tensor(f, EXPERT + "_scale", lambda t: t[:, :0]),
        r"wrongly shaped: .*w1.weight_scale",
    ),
    "scale dtype": (lambda f: edit_tensor(f, EXPERT + "_scale", lambda t: t.float()), "weight_scale has dtype F32"),
    "shard elsewhere": (lambda f: edit_index(f, {"x": "../ckpt/model-00001-of-000003.safetensors"}), "same folder"),
    "weight map a list": (lambda f: (f / checkpoint.INDEX).write_text('{"weight_map": [1]}'), "not an index"),
    "empty shard": (lambda f: (f / SHARD).write_bytes(b""), "damaged"),
    "header longer than the file": (lambda f: lie_about_header(f, 2**62), "damaged"),
    "header shorter than it is": (lambda f: lie_about_header(f, 8), "damaged"),
    "tensor past the end": (lambda f: edit_header(f, data_offsets=[0, 2**40]), "damaged"),
    "tensor of another size": (lambda f: edit_header(f, shape=[2**40, 2**40]), "damaged"),
    "tensor of an unknown dtype": (lambda f: edit_header(f, dtype="F3"), "damaged"),
    "shard is the folder above": (lambda f: edit_index(f, {"x": ".."}), "not in"),
    "shard with an absolute path": (lambda f: edit_index(f, {"x": "/etc/passwd"}), "same folder"),
    "shard with a name that no system has": (lambda f: edit_index(f, {"x": "a" * 5000}), "cannot be read"),
    "link to itself": (lambda f: ((f / SHARD).unlink(), (f / SHARD).symlink_to(f / SHARD)), "not in"),
    "index is a folder": (lambda f: ((f / checkpoint.INDEX).unlink(), (f / checkpoint.INDEX).mkdir()), "not an index"),
    "index without an end": (lambda f: (f / checkpoint.INDEX).write_text("[" * 100_000), "not an index"),
    "config without an end": (lambda f: (f / "config.json").write_text("[" * 100_000), "not JSON"),
    "two names of one tensor": (lambda f: store_twice(f), r"gate_proj.weight and .*gate_proj.weight in .* are one"),
    "two sets of weights": (lambda f: save_file({"a": torch.zeros(1)}, f / "model.safetensors"), "has both"),
    "more experts than memory": (lambda f: edit_config(f, num_experts=2**30), "too few for 13 layers of num_experts"),
    "another vocabulary": (lambda f: edit_config(f, vocab_size=300), r"2 wrongly shaped: .*embed_tokens"),
    "tied embeddings": (lambda f: edit_config(f, tie_word_embeddings=True), "tie_word_embeddings is True"),
    "head left out": (lambda f: edit_index(f, {"language_model.lm_head.weight": None}), "1 missing: .*lm_head"),
    "A_log tail": (
        lambda f: edit_tensor(f, LAYER + "self_attn.A_log", lambda t: t + 1),
        "A_log.*must be zeros",
    ),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damaged_checkpoints_are_one_clear_error(name: str, folder: Path) -> None:
    damage, expected = DAMAGE[name]
    damage(folder)
    with pytest.raises(Error, match=expected) as caught:
        load(folder)
    assert "\n" not in str(caught.value)


def test_all_faults_are_listed_at_once(folder: Path) -> None:
    norm = LAYER + "input_layernorm.weight"
    edit_tensor(folder, LAYER + "self_attn.dt_bias", lambda t: t[1:])
    edit_index(folder, {norm: None})
    save_file({"stray": torch.zeros(1)}, folder / "more.safetensors")
    edit_index(folder, {"stray": "more.safetensors"})
    with pytest.raises(Error) as caught:
        load(folder)
    for part in ("1 missing: " + norm, "1 extra: stray", "1 wrongly shaped", "dt_bias [63] instead of [64]"):
        assert part in str(caught.value)


def test_a_file_where_the_folder_should_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(Error, match="cannot be written"):
        save(tiny_model(), tmp_path / "file" / "out")
    with pytest.raises(Error, match="not a folder"):
        load(tmp_path / "absent")


def test_initialisation_follows_the_reports() -> None:
    for family, a_log in (("kimi_k3", (0.0, 0.0)), ("kimi_linear", (0.0, 2.7726))):
        model = initialize(Transformer(tiny_config(family)), seed=3)
        kda = model.layers[0].attn
        assert a_log[0] <= kda.A_log_H.min()
        assert kda.A_log_H.max() <= a_log[1] + 1e-4
        dt = torch.nn.functional.softplus(kda.dt_bias_HK)
        assert dt.min() >= 0.99e-3
        assert dt.max() <= 1.01e-1
        if family == "kimi_k3":
            assert not model.output_res.query_D.any()
        assert abs(model.embed.weight.std().item() - 0.02) < 1e-3
        twin = initialize(Transformer(tiny_config(family)), seed=3)
        assert same_weights(model, twin)
        logits = model(random_tokens(9, model.config.vocab_size), Sequences.from_lengths([9]))
        assert logits.isfinite().all()
