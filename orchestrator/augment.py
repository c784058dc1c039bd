"""How training images are varied: whole batches at a time, by the client's own random numbers."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

TRIES = 10  #: boxes drawn for an image before all of it is taken
HOLE = 16  #: side of the square that Cutout blanks

Size = tuple[int, int]
#: (images as they are stored, random numbers, size that the network wants, what black is) -> images
Augment = Callable[[Tensor, torch.Generator, Size, Tensor], Tensor]


def centre(x: Tensor, size: Size) -> Tensor:
    """Return the middle of images that are larger than wanted."""
    if x.shape[2:] == size:
        return x
    (h, w), (top, left) = size, ((have - want) // 2 for have, want in zip(x.shape[2:], size, strict=True))
    return x[:, :, top : top + h, left : left + w]


def flip(x: Tensor, rng: torch.Generator, size: Size, black: Tensor) -> Tensor:
    """Mirror every other image."""
    mirror = torch.randint(2, (len(x), 1, 1, 1), generator=rng, dtype=torch.bool).to(x.device)
    return torch.where(mirror, centre(x, size).flip(3), centre(x, size))


def crop_flip(x: Tensor, rng: torch.Generator, size: Size, black: Tensor) -> Tensor:
    """Crop each image at a random place after padding by 4 black pixels, and mirror every other one."""
    x = centre(x, size)
    b, _, h, w = x.shape
    top, left = (torch.randint(9, (b, 1), generator=rng) for _ in range(2))
    mirror = torch.randint(2, (b, 1), generator=rng, dtype=torch.bool)
    across = torch.arange(w).expand(b, w)
    rows = (top + torch.arange(h)).to(x.device)
    columns = (left + torch.where(mirror, across.flip(1), across)).to(x.device)
    padded = black.expand(b, -1, h + 8, w + 8).clone()
    padded[:, :, 4:-4, 4:-4] = x
    picked = padded.permute(0, 2, 3, 1)[
        torch.arange(b, device=x.device)[:, None, None], rows[:, :, None], columns[:, None, :]
    ]
    # A copy even where one channel lets the permuted tensor pass for contiguous: convolutions crash on its strides.
    return picked.permute(0, 3, 1, 2).clone(memory_format=torch.contiguous_format)


def crop_flip_cutout(x: Tensor, rng: torch.Generator, size: Size, black: Tensor) -> Tensor:
    """Crop and mirror, then set a square around a random pixel to zero, the mean (DeVries and Taylor, 2017)."""
    x = crop_flip(x, rng, size, black)
    down, across = (
        torch.arange(length) - torch.randint(length, (len(x), 1), generator=rng) + HOLE // 2 for length in size
    )
    hole = ((down >= 0) & (down < HOLE))[:, None, :, None] & ((across >= 0) & (across < HOLE))[:, None, None, :]
    return x.masked_fill(hole.to(x.device), 0.0)


def resized_crop_flip(x: Tensor, rng: torch.Generator, size: Size, black: Tensor) -> Tensor:
    """Bring a random box of each image to the wanted size, and mirror every other one (Szegedy et al., 2015).

    A box has 8 % to 100 % of the image's area and sides in a ratio of 3/4 to 4/3.
    """
    b, _, *stored = x.shape
    area = math.prod(stored) * torch.empty(b, TRIES).uniform_(0.08, 1, generator=rng)
    ratio = torch.empty(b, TRIES).uniform_(math.log(3 / 4), math.log(4 / 3), generator=rng).exp()
    boxes = torch.stack([(area / ratio).sqrt(), (area * ratio).sqrt()]).round()  # heights and widths
    whole = torch.tensor(stored, dtype=boxes.dtype)[:, None]
    fits = (boxes <= whole[..., None]).all(0) & (boxes >= 1).all(0)
    first = fits.int().argmax(1)
    sides = torch.where(fits.any(1), boxes[:, torch.arange(b), first], whole)
    starts = (torch.rand(2, b, generator=rng) * (whole - sides + 1)).floor()
    mirror = torch.randint(2, (b, 1, 1), generator=rng, dtype=torch.bool)
    down, across = (resampling(*each) for each in zip(starts, sides, stored, size, strict=True))
    across = torch.where(mirror, across.flip(1), across)
    return down[:, None].to(x) @ x @ across.mT[:, None].to(x)


def resampling(start: Tensor, side: Tensor, stored: int, wanted: int) -> Tensor:
    """Return the matrices [B, wanted, stored] that bring a part of a line to a length, linearly and antialiased."""
    scale = (side / wanted)[:, None, None]
    middle = start[:, None, None] + (torch.arange(wanted)[:, None] + 0.5) * scale
    at = torch.arange(stored) + 0.5
    weight = (1 - (at - middle).abs() / scale.clamp_min(1)).clamp_min(0)
    weight = weight * ((at > start[:, None, None]) & (at < (start + side)[:, None, None]))
    return weight / weight.sum(-1, keepdim=True)


AUGMENTS: dict[str, Augment] = {
    "flip": flip,
    "crop_flip": crop_flip,
    "crop_flip_cutout": crop_flip_cutout,
    "resized_crop_flip": resized_crop_flip,
}
