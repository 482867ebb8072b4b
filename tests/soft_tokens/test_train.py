"""Training: it learns, it goes on where it stopped, and two processes are as good as one."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from transformers import LlamaForCausalLM

from vllm_kvcompress.soft_tokens import losses
from vllm_kvcompress.soft_tokens.frozen import FrozenModel
from vllm_kvcompress.soft_tokens.losses import Scored
from vllm_kvcompress.soft_tokens.model import KINDS, DynamicTokens, StaticTokens, diversity_loss
from vllm_kvcompress.soft_tokens.settings import Optimization
from vllm_kvcompress.soft_tokens.train import Trainer

SCORED = Scored(2, 8)
SETTINGS = Optimization(epochs=3, selector_epochs=1, batch_size=4, learning_rate=0.1)


def make_tokens(kind, frozen):
    generator = torch.Generator().manual_seed(11)
    start = frozen.embed(torch.randint(300, (5,), generator=generator)).clone()
    if kind == "static":
        return StaticTokens(start)
    with torch.random.fork_rng():
        torch.manual_seed(2)
        library = torch.nn.init.orthogonal_(torch.empty(16, 32))
        return DynamicTokens(
            library, start, torch.full((5,), 0.1), 0.5, selection_width=8, hidden_width=16
        )


def make_trainer(kind, frozen, make_samples, settings=SETTINGS, checkpoint=None):
    tokens = make_tokens(kind, frozen)
    samples, held_out = make_samples(10, 1), make_samples(3, 2)
    return Trainer(frozen, tokens, samples, held_out, settings, SCORED, checkpoint), tokens


@pytest.mark.parametrize("kind", ["static", "dynamic"])
@pytest.mark.parametrize("loss", ["cross_entropy", pytest.param("mse", marks=pytest.mark.slow)])
def test_it_learns(frozen, make_samples, kind, loss):
    settings = Optimization(
        epochs=12, selector_epochs=2, batch_size=5, learning_rate=0.1, loss=loss
    )
    trainer, _ = make_trainer(kind, frozen, make_samples, settings)
    history = trainer.run()
    assert len(history.steps) == trainer.num_steps == 2 * (12 + 2 * (kind == "dynamic"))
    first, last = history.epochs[1], history.epochs[-1]
    assert last["loss"] < 0.9 * first["loss"]


def test_schedules(frozen, make_samples):
    trainer, _ = make_trainer("dynamic", frozen, make_samples)
    steps = trainer.run().steps
    temperatures = [step["temperature"] for step in steps]
    assert temperatures == sorted(temperatures, reverse=True)
    assert temperatures[0] == 1.0
    assert temperatures[-1] < 0.15
    rates = [step["rate"] for step in steps]
    assert 0.5 < max(rates) / SETTINGS.learning_rate <= 1
    assert rates[5] < 0.2 * max(rates)  # the end of the first phase
    assert rates[6] < rates[5] or rates[6] < max(rates)


def test_the_library_stands_in_the_second_phase(frozen, make_samples):
    first_only = Optimization(epochs=3, selector_epochs=0, batch_size=4, learning_rate=0.1)
    # the temperature depends on the number of steps, so that the first phases differ a little
    trainer, tokens = make_trainer("dynamic", frozen, make_samples)
    start = make_tokens("dynamic", frozen)
    seen = {}
    note = trainer._note

    def spy(phase, epoch, loss):
        seen[phase, epoch] = {n: v.detach().clone() for n, v in tokens.named_parameters()}
        note(phase, epoch, loss)

    trainer._note = spy
    trainer.run()
    before, after = seen["all", 3], seen["selector", 1]
    assert not torch.equal(before["library"], start.library)
    assert torch.equal(before["library"], after["library"])
    assert torch.equal(before["offset"], after["offset"])
    assert not torch.equal(before["selector.2.weight"], after["selector.2.weight"])
    one, _ = make_trainer("dynamic", frozen, make_samples, first_only)
    assert {row["phase"] for row in one.run().epochs} == {"untrained", "all"}


@pytest.mark.parametrize("kind", ["static", "dynamic"])
@pytest.mark.parametrize("stop", [1, 2])
def test_resume_is_bit_identical(frozen, make_samples, tmp_path, kind, stop):
    whole, expected = make_trainer(kind, frozen, make_samples)
    history = whole.run()
    file = tmp_path / "checkpoint.pt"
    cut, _ = make_trainer(kind, frozen, make_samples, checkpoint=file)
    with pytest.raises(StoppedError):
        cut.run(on_step=StopAfter(2 * stop + 1))
    assert file.is_file()
    again, tokens = make_trainer(kind, frozen, make_samples, checkpoint=file)
    steps = []
    resumed = again.run(resume=True, on_step=lambda: steps.append(1))
    assert resumed.steps == history.steps
    assert len(steps) == len(history.steps)
    assert [e["hit_rate"] for e in resumed.epochs] == [e["hit_rate"] for e in history.epochs]
    for name, value in expected.state_dict().items():
        assert torch.equal(value, tokens.state_dict()[name]), name


class StoppedError(Exception):
    """A training was stopped."""


class StopAfter:
    """Interrupts a training."""

    def __init__(self, count):
        self.count = count

    def __call__(self):
        self.count -= 1
        if self.count == 0:
            raise StoppedError


@pytest.mark.parametrize("change", [{"learning_rate": 0.2}, {"seed": 1}])
def test_a_checkpoint_of_another_training_is_refused(frozen, make_samples, tmp_path, change):
    file = tmp_path / "checkpoint.pt"
    make_trainer("static", frozen, make_samples, checkpoint=file)[0].run()
    other = Optimization(**{**vars(SETTINGS), **change})
    trainer, _ = make_trainer("static", frozen, make_samples, other, file)
    with pytest.raises(ValueError, match="other settings or prompts"):
        trainer.run(resume=True)


def _train(rank, config, weights, collected, address, results):
    torch.set_num_threads(1)
    network = LlamaForCausalLM(config)
    network.load_state_dict(weights)
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=2)
    frozen = FrozenModel(network)
    for kind in KINDS:
        tokens = make_tokens(kind, frozen)
        history = Trainer(frozen, tokens, *collected, SETTINGS, SCORED).run()
        results[rank, kind] = (history.steps, history.epochs, dict(tokens.state_dict()))
    dist.destroy_process_group()


@pytest.mark.slow
def test_two_processes_are_as_good_as_one(network, frozen, make_samples, tmp_path):
    collected = make_samples(10, 1), make_samples(3, 2)
    with mp.Manager() as manager:
        results = manager.dict()
        address = f"file://{tmp_path / 'meeting'}"
        model = network.config, network.state_dict()
        mp.spawn(_train, (*model, collected, address, results), nprocs=2)
        found = dict(results)
    for kind in KINDS:
        trainer, expected = make_trainer(kind, frozen, make_samples)
        history = trainer.run()
        for rank in range(2):
            steps, epochs, state = found[rank, kind]
            losses_of = [[step["loss"] for step in own] for own in (steps, history.steps)]
            assert losses_of[0] == pytest.approx(losses_of[1], rel=1e-4)
            last, last_expected = (own[-1]["validation_loss"] for own in (epochs, history.epochs))
            assert last == pytest.approx(last_expected, rel=1e-3)
            for name, value in expected.state_dict().items():
                torch.testing.assert_close(state[name], value, atol=2e-3, rtol=2e-2)
                assert torch.equal(state[name], found[0, kind][2][name]), name


def test_too_few_prompts_are_refused(frozen, make_samples):
    with pytest.raises(ValueError, match="10 prompts do not make a batch of 11"):
        make_trainer("static", frozen, make_samples, Optimization(batch_size=11))


def test_losses():
    gold = torch.tensor([[[0.5, 0.25, 0.25]]])
    found = torch.tensor([[[0.25, 0.5, 0.25]]])
    assert float(losses.divergence(gold, gold)) == 0
    expected = 0.5 * math.log(2) + 0.25 * math.log(0.5)
    assert float(losses.divergence(gold, found)) == pytest.approx(expected)
    assert float(losses.squared_error(gold, found)) == pytest.approx(2 * 0.0625 / 3 * 9)
    part = Scored(1, 2).part(torch.tensor([0.3, 0.1, 0.3, 0.2, 0.1]))
    torch.testing.assert_close(part, torch.tensor([0.25, 0.75]))
    scores = torch.tensor([[4.0, 3.0, 2.0, 1.0], [1.0, 2.0, 3.0, 4.0]])
    wanted = torch.tensor([[9.0, 1.0, 8.0, 2.0], [9.0, 8.0, 1.0, 2.0]])
    assert losses.hit_rate(scores, wanted, 0.5).tolist() == [0.5, 0.0]


def test_diversity():
    rows = torch.nn.init.orthogonal_(torch.empty(6, 8))
    assert float(diversity_loss(3 * rows)) == pytest.approx(0, abs=1e-6)
    assert float(diversity_loss(torch.ones(4, 8))) == pytest.approx(3.0, rel=1e-5)
