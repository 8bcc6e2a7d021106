"""Files with something wrong: bits, lengths, headers and tensors, each change drawn from a seeded generator."""

import json
import random
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from safetensors import deserialize
from safetensors.torch import _TYPES, save
from torch import Tensor

from stochbn.distributions.storage import seal
from stochbn.experiments.training.checkpoints import digest

HOSTILE: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 2**31, 2**53 + 1, 2**63, 10**400, -(10**400), 0.5, -0.0, 1e-320, 1e308, -1e308),
    *(
        float("nan"),
        float("inf"),
        "",
        "1",
        "\0",
        "\ud800",
        "\n",
        "[/]",
        "<b>",
        "/../../../../up",
        "x" * 5000,
        "9" * 4000,
    ),
    *([], [[]], [1], ["a"], {}, {"a": 1}, {"": {}}),
)
DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.bool)
DTYPES += (torch.complex64, torch.float8_e4m3fn)


def mutate(content: bytes, kind: str, rng: random.Random) -> bytes:
    """Changes a sound file: its bytes, or what it says, then often with a checksum that is right again."""
    action = rng.random()
    if action < 0.3:
        return _change_bytes(content, rng)
    if action < 0.45:
        return _change_outer_header(content, rng)
    header, tensors, sealed = unpack(content, kind)
    for _ in range(rng.choice((1, 1, 2))):
        if rng.random() < 0.6 or not tensors:
            header = change_value(header, rng)
        else:
            _change_tensor(tensors, rng)
    if isinstance(header, dict) and "sha256" in header and rng.random() < 0.9:  # that of a checkpoint's tensors
        with suppress(TypeError):  # a type that numpy lacks
            header["sha256"] = digest(tensors)
    if sealed and isinstance(header, dict) and rng.random() < 0.8:
        header = seal(header, tensors)
    text = json.dumps(header)
    if rng.random() < 0.1:
        text = rng.choice(
            [text[:-1], text.replace(":", ": {", 1), "[" * 50_000, text.replace("{", '{"seed": 1, "seed": 2, ', 1)]
        )
    return save(tensors, {kind: text})


def unpack(content: bytes, kind: str) -> tuple[Any, dict[str, Tensor], bool]:
    length = int.from_bytes(content[:8], "little")
    metadata = json.loads(content[8 : 8 + length])["__metadata__"]
    tensors = {}
    for name, info in deserialize(content):
        flat = (
            torch.frombuffer(bytearray(info["data"]), dtype=_TYPES[info["dtype"]]) if info["data"] else torch.zeros(0)
        )
        tensors[name] = flat.reshape(info["shape"])
    header = json.loads(metadata[kind])
    return header, tensors, header.pop("checksum", None) is not None


def change_value(value: Any, rng: random.Random) -> Any:
    """Replaces, removes, adds or renames one value, anywhere in what JSON holds."""
    if isinstance(value, (dict, list)) and value and rng.random() < 0.93:
        found = value.copy()
        key = rng.choice(list(found) if isinstance(found, dict) else range(len(found)))
        action = rng.random()
        if action < 0.1:
            del found[key]
        elif action < 0.15 and isinstance(found, dict):
            found[rng.choice(["", "kind", "sha256", f"{key}x", "\ud800"])] = found.pop(key)
        elif action < 0.2 and isinstance(found, list):
            found.append(found[key])
        else:
            found[key] = change_value(found[key], rng)
        return found
    if rng.random() < 0.05:
        deep: Any = value
        for _ in range(200):
            deep = [deep]
        return deep
    return rng.choice(HOSTILE)


def _change_tensor(tensors: dict[str, Tensor], rng: random.Random) -> None:
    name = rng.choice(sorted(tensors))
    tensor = tensors[name]
    changes: list[Callable[[], Tensor]] = [
        lambda: tensor.to(rng.choice(DTYPES)),
        lambda: tensor.reshape(-1),
        lambda: tensor[None],
        lambda: tensor[:0] if tensor.dim() else tensor,
        lambda: tensor[:-1].contiguous() if tensor.dim() else tensor,
        lambda: tensor.repeat(*[2] * tensor.dim()) if tensor.dim() else tensor,
        lambda: _fill(tensor, rng, everything=True),
        lambda: _fill(tensor, rng, everything=False),
    ]
    action = rng.random()
    if action < 0.1:
        del tensors[name]
    elif action < 0.2:
        tensors[rng.choice(["", "x", f"{name}x", "a/b/c/d", "sbn/test/log_probs"])] = tensors.pop(name)
    else:
        tensors[name] = rng.choice(changes)().contiguous()


def _fill(tensor: Tensor, rng: random.Random, *, everything: bool) -> Tensor:
    value = rng.choice([float("nan"), float("inf"), -1.0, 0.0, 255.0, 1e30, -1e30])
    if not tensor.is_floating_point():
        value = {0.0: 0, 255.0: 100}.get(value, 1)
    filled = tensor.clone()
    flat = filled.view(-1)
    if flat.numel() and filled.dtype not in (torch.bool, torch.float8_e4m3fn):
        flat[slice(None) if everything else rng.randrange(flat.numel())] = value
    return filled


def _change_bytes(content: bytes, rng: random.Random) -> bytes:
    data, action = bytearray(content), rng.randrange(6)
    where = rng.randrange(len(data)) if rng.random() < 0.5 else rng.randrange(min(len(data), 2000))
    if action < 3:
        for _ in range(action + 1):
            data[where] ^= 1 << rng.randrange(8)
            where = rng.randrange(len(data))
    elif action == 3:
        del data[where:]
    elif action == 4:
        data[where : where + rng.randrange(40)] = rng.randbytes(rng.randrange(40))
    else:
        data[:8] = rng.choice([0, 1, 2, 99_999_999, 2**62, 2**64 - 1, len(data)]).to_bytes(8, "little")
    return bytes(data)


def _change_outer_header(content: bytes, rng: random.Random) -> bytes:
    """Changes the header that safetensors itself reads."""
    length = int.from_bytes(content[:8], "little")
    header = change_value(json.loads(content[8 : 8 + length]), rng)
    text = json.dumps(header)
    if rng.random() < 0.2:
        text = rng.choice(["[" * 1000, text.replace('"F64"', '"F32"'), text.replace('"F16"', '"F4"'), text + text])
    encoded = text.encode("utf-8", "surrogatepass")
    return len(encoded).to_bytes(8, "little") + encoded + content[8 + length :]
