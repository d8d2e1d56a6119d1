"""Several streams and threads: a call has the noise of its number, whatever stream its kernels are on."""

import threading

import pytest
import torch

import shaketable as st
from tests.gpu.shaken_device import NOISE, ids, needs_cuda

pytestmark = needs_cuda
PLANS = [f"{NOISE}@module.linear", f"{NOISE}@module.linear,point=weight", f"{NOISE}@op.all", f"{NOISE},sparsity=0.5@layer.all"]


def on_streams(model, plan, streams, calls):
    """The logits of several calls, each on the next stream, none waiting for another."""
    found, tokens = [], ids()
    torch.cuda.synchronize()
    with torch.no_grad(), st.inject(model, plan, seed=1) as ledger:
        for number in range(calls):
            with torch.cuda.stream(streams[number % len(streams)]):
                found.append(model(tokens).logits)
        torch.cuda.synchronize()
    return found, ledger


@pytest.mark.parametrize("plan", PLANS)
def test_side_streams_give_what_the_default_stream_gives(tiny_llama, plan):
    model = tiny_llama.cuda()
    expected, ledger = on_streams(model, plan, [torch.cuda.default_stream()], 8)
    found, other = on_streams(model, plan, [torch.cuda.Stream(), torch.cuda.Stream()], 8)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert not torch.equal(found[0], found[1])
    assert other.sites[0].by("layer") == ledger.sites[0].by("layer")
    measured = [seen.sites[0].measured() for seen in (ledger, other)]
    counts = [(seen.fires, seen.values, seen.changed, seen.magnitudes) for seen in measured]
    assert counts[0] == counts[1], "the same fires are measured, whatever the stream"
    for seen in measured:
        assert "sparsity" in plan or seen.changed >= seen.values - 2
        assert seen.magnitude / seen.magnitudes == pytest.approx(0.05, rel=0.05)


def test_threads_with_streams_of_their_own(tiny_llama):
    """Which thread gets which number is open; that the numbers are those of two calls, each used once, is not."""
    model = tiny_llama.cuda()
    expected, ledger = on_streams(model, PLANS[0], [torch.cuda.default_stream()], 6)
    found, tokens = [], ids()
    torch.cuda.synchronize()

    def work():
        with torch.no_grad(), torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(3):
                found.append(model(tokens).logits)
            torch.cuda.current_stream().synchronize()

    with st.inject(model, PLANS[0], seed=1) as threaded:
        threads = [threading.Thread(target=work) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert all(sum(torch.equal(y, x) for x in found) == 1 for y in expected)
    assert threaded.sites[0].by("layer") == ledger.sites[0].by("layer")


def test_backward_on_a_side_stream(tiny_llama):
    model, results = tiny_llama.cuda(), []
    tokens = ids()
    for stream in (torch.cuda.default_stream(), torch.cuda.Stream()):
        torch.cuda.synchronize()
        model.zero_grad()
        with st.inject(model, f"{NOISE}@op.all", seed=1) as ledger, torch.cuda.stream(stream):
            model(tokens, labels=tokens).loss.backward()
            torch.cuda.synchronize()
        results.append(([p.grad.clone() for p in model.parameters()], ledger.forward, ledger.backward))
    assert results[0][1:] == results[1][1:]
    assert all(torch.equal(a, b) for a, b in zip(results[0][0], results[1][0], strict=True))
