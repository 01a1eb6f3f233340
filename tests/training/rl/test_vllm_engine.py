"""vLLM as an engine: it says what the policy says after every sync, and what is wrong otherwise is named."""

import random
import sys
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from bestiary.models import AutoDecoder, LoRAConfig, Qwen3
from bestiary.training.data.catalogue import Catalogue
from bestiary.training.data.semantic_ids import SemanticIds
from bestiary.training.errors import InvalidRun
from bestiary.training.integrations.needs import MissingLibrary
from bestiary.training.rl import rollout_check, vllm_engine
from bestiary.training.rl.embedded import EmbeddedEngine
from bestiary.training.rl.episodes import Episodes
from bestiary.training.rl.roles import Prompt
from bestiary.training.rl.rollout import Sampling
from bestiary.training.rl.rollout_check import Retokenised, StaleWeights, WrongTemperature, check_rollouts
from bestiary.training.rl.vllm_engine import EngineFailed, VllmEngine
from bestiary.training.rl.weight_sync import Answered, SyncFailed, sync, told_apart
from bestiary.verify.weights import perturb

from ...machine import require_vllm
from ...models.tiny import VOCAB, tiny_config

PROMPTS = [[5, 9, 2], [7], [3, 1, 4, 1, 5, 9, 2, 6]]
SAMPLING = Sampling(max_tokens=10, temperature=1.3, stop_ids=(3, 17, 40, 90, 150), n=2, seed=4)
LORA = LoRAConfig(r=2, alpha=4.0, targets=("q_proj", "down_proj"))
QUERY = "model.layers.1.self_attn.q_proj.weight"


def small(tied):
    config = tiny_config("qwen3", tie_word_embeddings=tied)
    return config.with_(
        hidden_size=64,
        num_hidden_layers=2,
        layer_types=config.layer_types[:2],
        max_position_embeddings=64,
        attention=replace(config.attention, num_heads=4, num_kv_heads=2, head_dim=32, scale=32**-0.5),
        rope=replace(config.rope, rotary_dim=32),
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    model = Qwen3(small(tied=False), dtype=torch.float32)
    perturb(model, seed=0)
    return model.save_pretrained(tmp_path_factory.mktemp("policy") / "start")


@pytest.fixture(scope="module")
def engine(folder):
    require_vllm()
    before = randomness()
    made = VllmEngine(folder, rows=8, cache_bytes=1 << 24)
    assert randomness() == before  # a trainer's process is as it was
    yield made
    made.close()


@pytest.fixture
def policy(folder):
    model = AutoDecoder.from_pretrained(folder, dtype=torch.float32, lora=LORA)
    perturb(model, seed=1)
    return model.train()


def step(model):
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimiser = torch.optim.SGD(trained, lr=0.05)
    ids = torch.tensor([[5, 9, 2, 8, 1, 30, 60]])
    model(ids, labels=ids).loss.backward()
    optimiser.step()
    optimiser.zero_grad()


def planted(monkeypatch, model, change):
    """The stream of the model's tensors, as `change` makes it."""
    kept = model.named_hf_tensors
    monkeypatch.setattr(model, "named_hf_tensors", lambda: change(kept()))


@pytest.mark.slow
def test_after_every_step_and_sync_the_engine_says_what_the_policy_says(engine, policy):
    """Adapters merged on the way, the base untouched; before the sync it does not."""
    base = {name: value.clone() for name, value in policy.state_dict().items() if "lora" not in name}
    for version in (1, 2):
        step(policy)
        found = sync(policy, engine, version)
        assert found.tensors == len(engine.shapes)
        assert {"model.embed_tokens.weight", "model.norm.weight"} <= set(found.read)
        assert not set(found.read) & set(found.unread)
        said = engine.generate(PROMPTS, SAMPLING)
        assert {one.version for one in said} == {version}
        mean = check_rollouts(policy, PROMPTS, said, SAMPLING, version=version).figures()["mismatch/mean"]
        assert mean <= 1e-4
    step(policy)
    with pytest.raises(StaleWeights, match=r"worst is token \d+ of answer \d+, id \d+"):
        check_rollouts(policy, PROMPTS, said, SAMPLING)
    with pytest.raises(StaleWeights, match="answer 0 is of version 2; the policy is at 3"):
        check_rollouts(policy, PROMPTS, said, SAMPLING, version=3)
    with pytest.raises(StaleWeights, match="version 2 and is told 3"):
        engine.version = 3
    assert all(torch.equal(value, policy.state_dict()[name]) for name, value in base.items())


def test_answers_are_those_of_their_seeds_and_end_at_stop_ids(engine, policy):
    """Alone, in company, in another order; of another seed they are others."""
    sync(policy, engine, 1)
    before = randomness()
    said = engine.generate(PROMPTS, SAMPLING, keys=list("abc"))
    assert randomness() == before
    again = engine.generate(PROMPTS[::-1], SAMPLING, keys=list("cba"))
    alone = engine.generate(PROMPTS[1:2], SAMPLING, keys=["b"])
    for one, other in zip([*said, *said[2:4]], [*again[4:], *again[2:4], *again[:2], *alone], strict=True):
        assert np.array_equal(one.ids, other.ids)
        np.testing.assert_allclose(one.log_probs, other.log_probs, atol=1e-4)
    assert [one.prompt for one in said] == [0, 0, 1, 1, 2, 2]
    assert len({one.ids.tobytes() for one in said}) > 3
    others = engine.generate(PROMPTS, replace(SAMPLING, seed=5), keys=list("abc"))
    assert any(not np.array_equal(one.ids, other.ids) for one, other in zip(said, others, strict=True))
    for one in engine.generate(PROMPTS, replace(SAMPLING, stop_ids=tuple(range(0, VOCAB, 4)), n=4)):
        stops = [place for place, word in enumerate(one.ids) if word % 4 == 0]
        assert stops == ([len(one) - 1] if one.finish == "stop" else [])
        assert one.finish == "stop" or len(one) == SAMPLING.max_tokens


def test_a_stale_weight_is_named_by_the_worst_token(engine, policy, monkeypatch):
    """One matrix of an earlier step in an otherwise whole sync, which no checksum of what was sent can see."""
    sync(policy, engine, 1)
    old = dict(engine_tensors(policy))[QUERY]
    step(policy)
    with monkeypatch.context() as patch:
        planted(patch, policy, lambda tensors: ((name, old if name == QUERY else value) for name, value in tensors))
        with pytest.raises(StaleWeights, match="worst is token"):
            sync(policy, engine, 2)
    refuses(engine)
    assert sync(policy, engine, 2).version == engine.version == 2


def test_a_dropped_doubled_or_misshapen_tensor_is_named(engine, policy, monkeypatch):
    """And the next whole sync is believed again."""
    changes = {
        rf"tensor {QUERY} was dropped": lambda name, value: [] if name == QUERY else [(name, value)],
        rf"tensor {QUERY} was sent twice": lambda name, value: [(name, value)] * (1 + (name == QUERY)),
        rf"tensor {QUERY} has shape": lambda name, value: [(name, value[:1] if name == QUERY else value)],
        r"tensor x\.weight is not in": lambda name, value: [("x.weight" if name == QUERY else name, value)],
    }
    for said, change in changes.items():
        with monkeypatch.context() as patch:
            planted(patch, policy, lambda tensors, change=change: (one for pair in tensors for one in change(*pair)))
            with pytest.raises(SyncFailed, match=said):
                sync(policy, engine, 3)
        refuses(engine)
    assert sync(policy, engine, 3).version == engine.version == 3


def test_an_interrupted_sync_and_a_value_changed_on_the_way_are_named(engine, policy, monkeypatch):
    def broken(tensors):
        for name, value in tensors:
            if name == QUERY:
                raise OSError("the link went down")
            yield name, value

    with monkeypatch.context() as patch:
        planted(patch, policy, broken)
        with pytest.raises(SyncFailed, match="OSError: the link went down"):
            sync(policy, engine, 4)
    refuses(engine)
    receive = engine.receive
    with monkeypatch.context() as patch:
        flipped = "model.layers.0.input_layernorm.weight"
        patch.setattr(engine, "receive", lambda sent: receive((name, -v if name == flipped else v) for name, v in sent))
        with pytest.raises(SyncFailed, match=rf"tensor {flipped} of version 4 did not arrive"):
            sync(policy, engine, 4)
    refuses(engine)
    sync(policy, engine, 4)


def test_another_temperature_is_named(engine, policy, monkeypatch):
    wanted = vllm_engine._wanted
    with monkeypatch.context() as patch:
        patch.setattr(vllm_engine, "_wanted", lambda *given: {**wanted(*given), "temperature": 0.5})
        with pytest.raises(WrongTemperature, match=r"sampled at temperature 0\.5 and are trained at 0\.8"):
            sync(policy, engine, 5)
    refuses(engine)
    sync(policy, engine, 5)
    with pytest.raises(InvalidRun, match=r"vLLM samples at 0\.01"):
        engine.generate(PROMPTS, replace(SAMPLING, temperature=0.001))
    with pytest.raises(InvalidRun, match=r"vLLM takes 2\.0 at most"):
        engine.generate(PROMPTS, replace(SAMPLING, temperature=3.0))
    with pytest.raises(InvalidRun, match=f"prompt 1 has id {VOCAB}"):
        engine.generate([[1], [VOCAB]], SAMPLING)


class Pairs:
    """Words 4 and 6 in turn, or an end (9) after any of them."""

    def allowed(self, beginning):
        assert 9 not in beginning, "nobody asks what follows the end"
        return [9, 6 if len(beginning) % 2 else 4]


def test_constrained_answers_are_items_and_their_probabilities_those_of_the_constrained_policy(engine, policy):
    """Whole at once or cut off behind; with and without stop ids; beside free answers the same as ever."""
    sync(policy, engine, 1)
    free = engine.generate(PROMPTS, SAMPLING)
    for ids, stops, tokens in ((3, (), 3), (3, (), 5), (2, (1,), 5)):
        items = np.array([[0, 0, 0], [0, 0, 3], [0, 4, 1], [2, 1, 1], [2, 1, 2], [2, 3, 4], [4, 4, 4]])[:, :ids]
        catalogue = Catalogue(SemanticIds(levels=ids, codebook_size=5, first_id=20), np.unique(items, axis=0))
        asked = Sampling(max_tokens=tokens, temperature=1.3, stop_ids=stops, n=4, seed=1, constraint=catalogue)
        said = engine.generate(PROMPTS, asked)
        assert all(one.finish == "stop" and catalogue.item(one.ids) is not None for one in said)
        assert len({one.ids.tobytes() for one in said}) > 3
        found = check_rollouts(policy, PROMPTS, said, asked, version=1).figures()
        assert found["mismatch/mean"] <= 1e-4
    asked = Sampling(max_tokens=3, temperature=2.0, stop_ids=(9,), n=12, constraint=Pairs())
    said = engine.generate(PROMPTS, asked)
    assert {one.finish for one in said} == {"stop", "length"}
    for one in said:
        assert [word for word in one.ids if word != 9] == [4, 6, 4][: len(one) - (one.finish == "stop")]
    assert check_rollouts(policy, PROMPTS, said, asked).figures()["mismatch/mean"] <= 1e-4
    again = engine.generate(PROMPTS, SAMPLING)
    assert all(np.array_equal(one.log_probs, other.log_probs) for one, other in zip(again, free, strict=True))
    nothing = Catalogue(SemanticIds(levels=1, codebook_size=4), np.zeros((0, 1), np.int64))
    far = Catalogue(SemanticIds(levels=1, codebook_size=4, first_id=VOCAB), np.array([[0]]))
    for constraint, told in ((nothing, "no id that may come first"), (far, f"allows id {VOCAB}, the vocabulary")):
        with pytest.raises(InvalidRun, match=f"constraint, a Catalogue, (has )?{told}"):
            engine.generate(PROMPTS, replace(asked, constraint=constraint))


def test_ids_that_were_changed_between_are_named(engine, policy):
    """Other ids of the same number, as decoding and encoding makes them, and another number."""
    sync(policy, engine, 6)
    said = engine.generate(PROMPTS, replace(SAMPLING, stop_ids=()))
    ids = said[3].ids.copy()
    ids[4] = (ids[4] + 50) % VOCAB
    with pytest.raises(Retokenised, match="answer 3 agrees with what was sampled up to token 4"):
        check_rollouts(policy, PROMPTS, [*said[:3], replace(said[3], ids=ids), *said[4:]], SAMPLING)
    with pytest.raises(Retokenised, match="answer 0 has 9 tokens and 10 log-probabilities"):
        check_rollouts(policy, PROMPTS, [replace(said[0], ids=said[0].ids[1:])], SAMPLING)


def test_a_missed_sync_is_told_from_a_policy_that_moved_less_than_the_tolerance(engine, policy, monkeypatch):
    """All tensors unread, any tolerance: the engine still says what it said at the last sync."""
    sync(policy, engine, 1)
    assert sync(policy, engine, 1).unverified  # nothing moved
    step(policy)
    with monkeypatch.context() as patch:
        patch.setattr(engine, "receive", lambda sent: [name for name, _ in sent if not name])
        patch.setattr(engine, "held", lambda name: None)
        with pytest.raises(StaleWeights, match="the engine kept its earlier weights"):
            sync(policy, engine, 2, tolerance=10.0)
    assert not sync(policy, engine, 2).unverified


def test_old_and_new_weights_are_told_apart_where_the_policy_moved_beyond_the_noise():
    ids, policy = (torch.tensor([4, 5, 6]),), torch.tensor([-1.0, -2.0, -3.0]).double()
    then = Answered((1,), 0.8, ids, (policy,), (policy + 0.01,))
    for moved, engine, expected in [(0.2, 0.21, True), (0.03, 0.01, False)]:
        now = Answered((1,), 0.8, ids, (policy + moved,), (policy + engine,))
        assert told_apart(now, then) is expected
    with pytest.raises(StaleWeights, match="kept its earlier weights"):
        told_apart(Answered((1,), 0.8, ids, (policy + 0.2,), (policy + 0.01,)), then)
    other = Answered((1,), 0.8, (torch.tensor([9, 5, 6]),), (policy + 0.2,), (policy + 0.01,))
    assert not told_apart(other, then)
    assert not told_apart(other, None)


def test_the_tolerance_is_that_of_the_narrower_side(engine, policy):
    """The engine's dtype is given; of float32 parameters that are gathered in bfloat16 it is bfloat16's."""
    asked = replace(SAMPLING, stop_ids=())
    said = EmbeddedEngine(policy).generate(PROMPTS, asked)
    off = [replace(one, log_probs=one.log_probs + 0.01) for one in said]
    with pytest.raises(StaleWeights):
        check_rollouts(policy, PROMPTS, off, asked)
    check_rollouts(policy, PROMPTS, off, asked, engine_dtype=torch.bfloat16)
    spread = fully_shard(policy, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, cast_forward_inputs=False))
    assert next(spread.parameters()).dtype == torch.float32
    found = check_rollouts(spread, PROMPTS, said, asked).figures()["mismatch/mean"]
    assert 1e-4 < found <= 5e-2


def test_no_logits_are_kept_while_answers_agree(policy, monkeypatch):
    said = EmbeddedEngine(policy).generate(PROMPTS, SAMPLING)
    monkeypatch.setattr(rollout_check, "_logits", None)
    check_rollouts(policy, PROMPTS, said, SAMPLING)


def test_a_temperature_is_blamed_only_where_it_explains_most(policy):
    """Other weights, just above the bound and a little nearer at another temperature, are stale."""
    asked = Sampling(max_tokens=10, temperature=1.0, n=2, seed=4)
    said = EmbeddedEngine(policy).generate(PROMPTS, asked)
    with pytest.raises(WrongTemperature, match=r"trained at 1\.05"):
        check_rollouts(policy, PROMPTS, said, replace(asked, temperature=1.05))
    signs = np.array([1.0, -1.0] * 5, np.float32)
    off = [replace(one, log_probs=one.log_probs + 0.02 * signs[: len(one)]) for one in said]
    bound = 0.02 + 1e-5  # of what is left at temperature 1
    with pytest.raises(StaleWeights):
        check_rollouts(policy, PROMPTS, off, replace(asked, temperature=1.05), tolerance=bound)


def test_a_stored_head_that_the_config_ties_is_not_waited_for(tmp_path, monkeypatch):
    model = Qwen3(small(tied=True), dtype=torch.float32)
    folder = model.save_pretrained(tmp_path / "tied")
    stored = folder / "model.safetensors"
    tensors = load_file(stored)
    save_file({**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, stored, {"format": "pt"})
    for tied in (True, False):
        text = SimpleNamespace(to_dict=lambda tied=tied: {"tie_word_embeddings": tied})
        config = SimpleNamespace(hf_text_config=text, max_model_len=8, get_vocab_size=lambda: VOCAB)
        runner = SimpleNamespace(get_model=torch.nn.Module)
        worker = SimpleNamespace(driver_worker=SimpleNamespace(model_runner=runner))
        llm = SimpleNamespace(model_config=config, llm_engine=SimpleNamespace(model_executor=worker))
        monkeypatch.setattr(vllm_engine, "_started", lambda *_, llm=llm, **__: (llm, None, None))
        assert (set(VllmEngine(folder).shapes) == {name for name, _ in model.named_hf_tensors()}) is tied


def test_the_embedded_engine_is_synced_by_its_version(policy):
    engine = EmbeddedEngine(policy)
    assert sync(policy, engine, 7).parity.figures()["mismatch/mean"] <= 1e-4
    assert engine.version == 7
    with pytest.raises(InvalidRun, match="another model"):
        sync(policy, EmbeddedEngine(SimpleNamespace()), 7)


def test_without_its_system_library_the_error_names_the_package(folder, monkeypatch):
    monkeypatch.setattr(vllm_engine, "has_library", lambda _name: False)
    monkeypatch.setattr(vllm_engine, "find_spec", lambda _name: object())
    with pytest.raises(MissingLibrary, match=r"(?s)libnuma.*apt-get install libnuma1"):
        VllmEngine(folder)


def test_without_vllm_one_error_says_how_to_install_it(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(MissingLibrary, match=r"(?s)vllm is not installed.*pip install"):
        VllmEngine(folder)


@pytest.mark.slow
def test_a_sampler_has_the_engine_in_its_thread_and_asks_again_for_what_it_gave_up(engine, policy, monkeypatch):
    sync(policy, engine, 5)
    prompts = [Prompt(prompt_id=f"p{n}", ids=tuple(ids)) for n, ids in enumerate(PROMPTS)]
    episodes = Episodes(engine, context=64)
    try:
        with monkeypatch.context() as patch:
            patch.setattr(engine._llm, "generate", lambda *_, **__: refuse("the engine core died"))
            episodes.put(prompts, SAMPLING)
            with pytest.raises(EngineFailed, match="the engine core died"):
                episodes.take(3)
            assert episodes.in_flight == ("p0", "p1", "p2")
        episodes.resume()
        groups = {group[0].prompt_id: group for group in episodes.take(3)}
    finally:
        monkeypatch.setattr(engine, "close", lambda: None)
        episodes.close()
    for prompt in prompts:
        for one in groups[prompt.prompt_id]:
            key = (SAMPLING.seed, prompt.prompt_id, one.sample, 0)
            (alone,) = engine.generate([prompt.ids], replace(SAMPLING, n=1, seed=0), keys=[key])
            assert one.ids.tolist() == [*prompt.ids, *alone.ids.tolist()]
            assert (one.version, one.finish) == (5, alone.finish)


def refuse(told):
    raise RuntimeError(told)


def randomness():
    """States of this process's generators."""
    return random.getstate(), np.random.get_state()[1].tobytes(), torch.get_rng_state().numpy().tobytes()


def engine_tensors(model):
    return [(name, value.clone()) for name, value in model.named_hf_tensors()]


def refuses(engine):
    with pytest.raises(SyncFailed, match="no weights of any version: its last sync failed"):
        engine.generate(PROMPTS, SAMPLING)
