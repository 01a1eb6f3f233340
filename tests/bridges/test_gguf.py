"""GGUF to Hugging Face, on files written here by the gguf package; transformers' own reader is the other oracle."""

import json
import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
)

from bestiary.bridges.errors import (
    CheckpointNotFound,
    CorruptCheckpoint,
    FolderNotEmpty,
    KeyMismatch,
    UnsupportedConfig,
    UnsupportedLoad,
    UnsupportedModelType,
)
from bestiary.bridges.gguf import GGUFFile, gguf_to_hf_folder

F32, Q8_0 = gguf.GGMLQuantizationType.F32, gguf.GGMLQuantizationType.Q8_0
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6

PROJECTIONS = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
NAMES = {
    "gemma3": PROJECTIONS
    | {
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "post_attention_norm",
        "pre_feedforward_layernorm": "ffn_norm",
        "post_feedforward_layernorm": "post_ffw_norm",
        "self_attn.q_norm": "attn_q_norm",
        "self_attn.k_norm": "attn_k_norm",
    },
    "llama": PROJECTIONS | {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"},
}

SPECIAL = ["<pad>", "<eos>", "<bos>", "<unk>"]
# Best score first, so "bc" joins before "ab". Runs of spaces stand as spaces in a GGUF.
GEMMA_PIECES = [
    *((piece, CONTROL, -1000.0) for piece in SPECIAL),
    *((" " * n, USER_DEFINED, -1000.0) for n in (2, 3, 4)),
    *((f"<0x{byte:02X}>", BYTE, 0.0) for byte in range(256)),
    *((piece, NORMAL, -float(rank)) for rank, piece in enumerate(["▁a", "bc", "ab", "▁ab", "▁", "a", "b", "c"])),
]


def gguf_name(architecture: str, hub: str) -> str:
    """The GGUF name of a hub parameter, written independently of the reader's tables."""
    if hub == "model.embed_tokens.weight":
        return "token_embd.weight"
    if hub in {"model.norm.weight", "lm_head.weight"}:
        return {"model.norm.weight": "output_norm.weight", "lm_head.weight": "output.weight"}[hub]
    _, _, layer, leaf = hub.removesuffix(".weight").split(".", 3)
    return f"blk.{layer}.{NAMES[architecture][leaf]}.weight"


def to_gguf(architecture: str, name: str, weight: np.ndarray, heads: dict[str, int]) -> np.ndarray:
    """What llama.cpp's converter does to a weight."""
    if architecture == "gemma3" and name.endswith("norm.weight"):
        return weight + 1
    kind = name.split(".")[-2]
    if architecture == "llama" and kind in heads:
        n, width = heads[kind], weight.shape[1]
        return weight.reshape(n, 2, weight.shape[0] // n // 2, width).swapaxes(1, 2).reshape(weight.shape)
    return weight


def gemma_config(**changes: object) -> Gemma3TextConfig:
    fields = {
        "vocab_size": len(GEMMA_PIECES),
        "hidden_size": 96,
        "intermediate_size": 160,
        "num_hidden_layers": 7,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "query_pre_attn_scalar": 32,
        "sliding_window": 5,
        "max_position_embeddings": 640,
        "rms_norm_eps": 1e-6,
        "bos_token_id": 2,
        "eos_token_id": 1,
        "pad_token_id": 0,
    }
    return Gemma3TextConfig(**(fields | changes))


def llama_config(**changes: object) -> LlamaConfig:
    fields = {
        "vocab_size": 259,
        "hidden_size": 96,
        "intermediate_size": 160,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 640,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 50000.0},
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
    }
    return LlamaConfig(**(fields | changes))


def random_model(config: Gemma3TextConfig | LlamaConfig) -> Gemma3ForCausalLM | LlamaForCausalLM:
    torch.manual_seed(3)
    kind = Gemma3ForCausalLM if isinstance(config, Gemma3TextConfig) else LlamaForCausalLM
    model = kind(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.3)
            # llama.cpp adds 1 to Gemma's norms in fp32: bf16 values survive that exactly, as real ones do
            parameter.copy_(parameter.bfloat16())
    return model


def write_gguf(
    path: Path,
    model: Gemma3ForCausalLM | LlamaForCausalLM,
    *,
    quantization: gguf.GGMLQuantizationType = F32,
    extra: dict[str, float] | None = None,
    leave_out: str | None = None,
    add: tuple[str, np.ndarray] | None = None,
    end_of_turn: int | None = None,
    without: tuple[str, ...] = (),
) -> Path:
    """Writes `model` as llama.cpp's converter would."""
    config = model.config
    architecture = {"gemma3_text": "gemma3", "llama": "llama"}[config.model_type]
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    if "attention.layer_norm_rms_epsilon" not in without:
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    if architecture == "gemma3":
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
        writer.add_sliding_window(config.sliding_window)
        writer.add_rope_freq_base(config.rope_parameters["full_attention"]["rope_theta"])
        writer.add_tokenizer_model("llama")
        writer.add_tokenizer_pre("default")
        writer.add_token_list([piece for piece, _, _ in GEMMA_PIECES])
        writer.add_token_types([kind for _, kind, _ in GEMMA_PIECES])
        writer.add_token_scores([score for _, _, score in GEMMA_PIECES])
        writer.add_unk_token_id(3)
        writer.add_add_space_prefix(False)
        writer.add_add_bos_token(True)
    else:
        writer.add_rope_dimension_count(config.head_dim)
        writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
        writer.add_vocab_size(config.vocab_size)
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("smollm")
        alphabet = byte_alphabet()
        writer.add_token_list(["<|a|>", "<|b|>", *alphabet, "Ġ0"])
        writer.add_token_types([CONTROL, CONTROL] + [NORMAL] * (len(alphabet) + 1))
        writer.add_token_merges(["Ġ 0"])
    writer.add_bos_token_id(config.bos_token_id)
    writer.add_eos_token_id(config.eos_token_id)
    writer.add_pad_token_id(config.pad_token_id)
    if end_of_turn is not None:
        writer.add_eot_token_id(end_of_turn)
    for key, value in (extra or {}).items():
        add_value = writer.add_string if isinstance(value, str) else writer.add_float32
        add_value(f"{architecture}.{key}", value)
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    for hub, tensor in model.named_parameters():
        name = gguf_name(architecture, hub)
        if name == leave_out:
            continue
        weight = to_gguf(architecture, name, tensor.detach().numpy(), heads)
        kind = F32 if weight.ndim == 1 else quantization
        writer.add_tensor(name, gguf.quantize(np.ascontiguousarray(weight), kind), raw_dtype=kind)
    if add is not None:
        writer.add_tensor(*add)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def byte_alphabet() -> list[str]:
    """The 256 printable stand-ins of GPT-2's byte-level BPE, by byte."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(byte) if byte in plain else chr(next(others)) for byte in range(256)]


def load(folder: Path) -> torch.nn.Module:
    model, info = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert not any(info.values()), info
    return model.eval()


@pytest.mark.parametrize("config", [gemma_config, llama_config])
@pytest.mark.parametrize("tied", [True, False])
def test_the_folder_is_the_model_that_was_written(tmp_path, config, tied):
    """hub → llama.cpp's layout → our reader: every weight bit-equal, and the same logits."""
    model = random_model(config(tie_word_embeddings=tied))
    folder = gguf_to_hf_folder(write_gguf(tmp_path / "m.gguf", model), tmp_path / "hf")
    again = load(folder)
    before, after = model.state_dict(), again.state_dict()
    assert before.keys() == after.keys()
    assert [name for name in before if not torch.equal(before[name], after[name])] == []
    assert (again.lm_head.weight.data_ptr() == again.model.embed_tokens.weight.data_ptr()) is tied
    tokens = torch.arange(23)[None] * 7 % model.config.vocab_size
    assert torch.equal(model(tokens).logits, again(tokens).logits)


@pytest.mark.parametrize("config", [gemma_config, llama_config])
def test_config_is_the_one_the_file_came_from(tmp_path, config):
    """Every architecture field, the RoPE of both layer types and the layer pattern among them."""
    model = random_model(config())
    folder = gguf_to_hf_folder(write_gguf(tmp_path / "m.gguf", model), tmp_path / "hf")
    wanted, got = model.config.to_dict(), type(model.config).from_pretrained(folder).to_dict()
    bookkeeping = {"_name_or_path", "architectures", "dtype", "transformers_version"}
    assert {name: (wanted[name], got[name]) for name in wanted if wanted[name] != got[name]}.keys() <= bookkeeping


@pytest.mark.parametrize("config", [gemma_config, llama_config])
def test_quantised_tensors_equal_transformers_reading(tmp_path, config):
    """Q8_0: bit-equal to transformers' GGUF loader, and to the format's definition (scale × int8)."""
    model = random_model(config())
    file = write_gguf(tmp_path / "m.gguf", model, quantization=Q8_0)
    ours = load(gguf_to_hf_folder(file, tmp_path / "hf")).state_dict()
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=file.name, dtype=torch.float32).state_dict()
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []

    name = "model.layers.1.mlp.down_proj.weight"
    stored = gguf.quantize(dict(model.named_parameters())[name].detach().numpy(), Q8_0).reshape(-1, 34)
    scale, codes = stored[:, :2].copy().view(np.float16), stored[:, 2:].copy().view(np.int8)
    assert np.array_equal(ours[name].numpy().reshape(-1, 32), scale.astype(np.float32) * codes)


def test_bfloat16_rounds_the_dequantised_values(tmp_path):
    model = random_model(gemma_config())
    file = write_gguf(tmp_path / "m.gguf", model, quantization=Q8_0)
    exact = load(gguf_to_hf_folder(file, tmp_path / "f32")).state_dict()
    folder = gguf_to_hf_folder(file, tmp_path / "bf16", "bfloat16")
    rounded = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    assert {tensor.dtype for tensor in rounded.values()} == {torch.bfloat16}
    assert all(torch.equal(exact[name].bfloat16(), rounded[name]) for name in exact)


def test_linear_rope_scaling_is_carried_for_full_attention_only(tmp_path):
    """Gemma 3 4B and up: transformers' own GGUF reader loses this one."""
    model = random_model(gemma_config())
    extra = {"rope.scaling.type": "linear", "rope.scaling.factor": 8.0}
    config = GGUFFile(write_gguf(tmp_path / "m.gguf", model, extra=extra)).hf_config()
    assert config["rope_parameters"] == {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1_000_000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    }


@pytest.mark.parametrize(("end_of_turn", "stops"), [(None, 1), (1, 1), (4, [1, 4])])
def test_the_end_of_a_turn_is_a_stop_id(tmp_path, end_of_turn, stops):
    """As in the hub's generation_config.json of Gemma 3 and Llama 3: a chat that knows <eos> alone never ends."""
    model = random_model(gemma_config(num_hidden_layers=1))
    folder = gguf_to_hf_folder(write_gguf(tmp_path / "m.gguf", model, end_of_turn=end_of_turn), tmp_path / "hf")
    for name in ("config.json", "generation_config.json"):
        assert json.loads((folder / name).read_text())["eos_token_id"] == stops


@pytest.fixture(scope="module")
def gemma(tmp_path_factory):
    """The tokenizer of a tiny Gemma 3."""
    folder = tmp_path_factory.mktemp("gemma")
    file = write_gguf(folder / "m.gguf", random_model(gemma_config(num_hidden_layers=1)))
    return AutoTokenizer.from_pretrained(gguf_to_hf_folder(file, folder / "hf"))


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """The tokenizer of a tiny Llama."""
    folder = tmp_path_factory.mktemp("llama")
    file = write_gguf(folder / "m.gguf", random_model(llama_config()))
    return AutoTokenizer.from_pretrained(gguf_to_hf_folder(file, folder / "hf"))


class TestTokenizer:
    """What `tokenizer.json` makes of text."""

    def test_beginning_of_sequence_is_added_where_the_file_says_so(self, gemma, llama):
        assert gemma("a").input_ids[0] == gemma.bos_token_id == 2
        assert len(llama("a").input_ids) == 1

    @pytest.mark.parametrize(
        ("text", "pieces"),
        [
            ("ab", ["ab"]),
            ("abc", ["a", "bc"]),
            (" ab", ["▁ab"]),
            (" abc", ["▁a", "bc"]),
            ("a    b", ["a", "▁▁▁▁", "b"]),
            ("é", ["<0xC3>", "<0xA9>"]),
            ("<eos>a", ["<eos>", "a"]),
        ],
    )
    def test_merges_follow_the_scores(self, gemma, text, pieces):
        assert gemma.convert_ids_to_tokens(gemma(text, add_special_tokens=False).input_ids) == pieces

    def test_longest_run_of_spaces_first(self, gemma):
        """User-defined runs of spaces share one score; SentencePiece prefers the longest left part."""
        ids = gemma("     ", add_special_tokens=False).input_ids
        assert gemma.convert_ids_to_tokens(ids) == ["▁▁▁▁", "▁"]

    @pytest.mark.parametrize("text", ["", " a\n\tb  c", "naïve 日本 🙂", "    0 12 abcab", "<unk><bos>"])
    def test_decoding_gives_the_text_back(self, gemma, llama, text):
        for tokenizer in (gemma, llama):
            ids = tokenizer(text, add_special_tokens=False).input_ids
            assert tokenizer.decode(ids) == text

    def test_digits_stand_alone(self, llama):
        """The pre-tokenizer "smollm" splits a digit from its space, so the merge "Ġ 0" never applies."""
        assert llama.convert_ids_to_tokens(llama(" 0 1").input_ids) == ["Ġ", "0", "Ġ", "1"]


@pytest.fixture(scope="module")
def model():
    """Two layers of Gemma 3."""
    return random_model(gemma_config(num_hidden_layers=2))


@pytest.fixture
def refuses(tmp_path):
    """Converts a file that must be refused, and sees that nothing was left behind."""

    def check(file: Path, error: type[Exception], match: str, code: int) -> None:
        with pytest.raises(error, match=match) as caught:
            gguf_to_hf_folder(file, tmp_path / "hf")
        assert caught.value.exit_code == code
        assert caught.value.remedy
        assert [path for path in tmp_path.iterdir() if path.is_dir()] == []

    return check


class TestRefusals:
    """Bad input: one typed error each, and nothing written."""

    def test_missing_file(self, tmp_path, refuses):
        refuses(tmp_path / "nowhere.gguf", CheckpointNotFound, "nowhere.gguf", 7)

    def test_not_gguf(self, tmp_path, refuses):
        (tmp_path / "m.gguf").write_bytes(b"PK\x03\x04" + bytes(100))
        refuses(tmp_path / "m.gguf", CorruptCheckpoint, "magic", 2)

    @pytest.mark.parametrize("fraction", [0.0, 0.001, 0.02, 0.05, 0.5, 0.999])
    def test_truncated(self, tmp_path, model, refuses, fraction):
        """In the header, in the token list, in the tensor table, in the weights."""
        data = write_gguf(tmp_path / "m.gguf", model).read_bytes()
        (tmp_path / "m.gguf").write_bytes(data[: int(len(data) * fraction)])
        refuses(tmp_path / "m.gguf", CorruptCheckpoint, "header|ends beyond", 2)

    def test_not_finite(self, tmp_path, model, refuses):
        file = write_gguf(tmp_path / "m.gguf", model)
        data = bytearray(file.read_bytes())
        data[-4:] = struct.pack("<f", float("nan"))
        file.write_bytes(bytes(data))
        refuses(file, CorruptCheckpoint, "not finite", 2)

    def test_unknown_architecture(self, tmp_path, refuses):
        writer = gguf.GGUFWriter(tmp_path / "m.gguf", "mamba")
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        refuses(tmp_path / "m.gguf", UnsupportedModelType, "mamba", 4)

    def test_unknown_metadata(self, tmp_path, model, refuses):
        file = write_gguf(tmp_path / "m.gguf", model, extra={"attention.temperature": 2.0})
        refuses(file, UnsupportedConfig, "gemma3.attention.temperature = 2.0", 4)

    def test_unknown_rope_scaling(self, tmp_path, model, refuses):
        file = write_gguf(tmp_path / "m.gguf", model, extra={"rope.scaling.type": "yarn"})
        refuses(file, UnsupportedConfig, "gemma3.rope.scaling.type = 'yarn'", 4)

    def test_missing_metadata(self, tmp_path, model, refuses):
        name = "attention.layer_norm_rms_epsilon"
        refuses(write_gguf(tmp_path / "m.gguf", model, without=(name,)), CorruptCheckpoint, f"gemma3.{name}", 2)

    def test_missing_tensor(self, tmp_path, model, refuses):
        file = write_gguf(tmp_path / "m.gguf", model, leave_out="blk.1.attn_k.weight")
        refuses(file, KeyMismatch, r"missing +1: blk.1.attn_k.weight", 2)

    def test_extra_tensor(self, tmp_path, model, refuses):
        file = write_gguf(tmp_path / "m.gguf", model, add=("blk.2.attn_k.weight", np.zeros((4, 4), np.float32)))
        refuses(file, KeyMismatch, r"extra +1: blk.2.attn_k.weight", 2)

    def test_wrong_shape(self, tmp_path, model, refuses):
        name = "blk.0.attn_k.weight"
        file = write_gguf(tmp_path / "m.gguf", model, leave_out=name, add=(name, np.zeros((64, 32), np.float32)))
        refuses(file, KeyMismatch, r"blk.0.attn_k.weight \(64, 32\) instead of \(64, 96\)", 2)

    def test_unknown_dtype(self, tmp_path, model):
        with pytest.raises(UnsupportedLoad, match="int8"):
            gguf_to_hf_folder(write_gguf(tmp_path / "m.gguf", model), tmp_path / "hf", "int8")

    def test_occupied_folder_is_kept_unless_told_otherwise(self, tmp_path, model):
        file = write_gguf(tmp_path / "m.gguf", model)
        (tmp_path / "hf").mkdir()
        (tmp_path / "hf" / "mine.txt").write_text("kept")
        with pytest.raises(FolderNotEmpty, match="hf"):
            gguf_to_hf_folder(file, tmp_path / "hf")
        assert [path.name for path in (tmp_path / "hf").iterdir()] == ["mine.txt"]
        gguf_to_hf_folder(file, tmp_path / "hf", overwrite=True)
        assert json.loads((tmp_path / "hf" / "config.json").read_text())["model_type"] == "gemma3_text"
        assert not (tmp_path / "hf" / "mine.txt").exists()
