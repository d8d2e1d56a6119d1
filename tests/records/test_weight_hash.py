"""The hash of weights: the same for the same weights, and another for whatever differs."""

import hashlib

import torch

from shaketable.records.weight_hash import digest

W = torch.arange(6, dtype=torch.float32).reshape(2, 3)


def test_it_is_sha256_as_anybody_can_compute_it():
    content = b"head\na torch.float32 (2, 3)\n" + W.numpy().tobytes() + b"\nb torch.int64 (1,)\n" + (7).to_bytes(8, "little")
    assert digest("head", {"b": torch.tensor([7]), "a": W}) == hashlib.sha256(content).hexdigest()


def test_text_name_shape_type_and_every_value_count_and_layout_does_not():
    changed = W.clone()
    changed[1, 2] += 1
    variants = [
        digest("", {"a": W}), digest("x", {"a": W}), digest("", {"b": W}), digest("", {"a": W.reshape(3, 2)}),
        digest("", {"a": W.view(torch.int32)}), digest("", {"a": changed}), digest("", {"a": W, "c": W}), digest("", {}),
    ]  # fmt: skip
    assert len(set(variants)) == len(variants)
    assert digest("", {"a": W.T.contiguous().T}) == variants[0]
    assert digest("", {"a": torch.tensor(1.0)}) != digest("", {"a": torch.tensor(2.0)}), "a number alone has a hash too"
