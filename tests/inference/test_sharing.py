"""The recording of what draws share."""

import pytest
import torch

from stochbn.inference.sharing import DivergedError, Recording


def test_only_what_the_rest_reads_is_kept() -> None:
    a = torch.ones(3)
    recording = Recording([a])
    b = recording.call(torch.exp, (a,), {})
    c = recording.call(torch.sqrt, (b,), {})
    recording.stop(c)
    assert recording.reusable
    recording.rewind()
    b = recording.call(torch.exp, (a,), {})
    assert b.device.type == "meta"
    assert recording.call(torch.sqrt, (b,), {}) is c
    assert torch.equal(recording.call(torch.neg, (c,), {}), -c)  # after the shared part all is computed


def test_a_pass_that_differs_from_the_recorded_one_is_noticed() -> None:
    a = torch.ones(3)
    recording = Recording([a])
    recording.stop(recording.call(torch.exp, (a,), {}))
    for function, argument in ((torch.sqrt, a), (torch.exp, torch.zeros(3))):
        recording.rewind()
        with pytest.raises(DivergedError, match="exp"):
            recording.call(function, (argument,), {})
    recording.rewind()
    with pytest.raises(DivergedError, match="exp"):
        recording.stop()  # before anything was called


def test_a_tensor_that_took_over_an_id_is_not_mistaken_for_the_old_one() -> None:
    a = torch.ones(3)
    recording = Recording([a])
    for _ in range(50):  # temporaries die and their ids come back
        recording.call(torch.add, (a, 1), {})
    kept = recording.call(torch.add, (a, 2), {})
    recording.stop(kept)
    recording.rewind()
    for _ in range(50):
        assert recording.call(torch.add, (a, 1), {}).device.type == "meta"
    assert recording.call(torch.add, (a, 2), {}) is kept
