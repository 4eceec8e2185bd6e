"""Image towers compiled for images of one size: rows are those of eager mode."""

from __future__ import annotations

import pytest
import torch

from compilespec.errors import NotSupported, TraceError
from compilespec.progress import Progress, Reporter
from compilespec.runtime.compiled_tower import CompiledTower, compile_tower
from compilespec.runtime.image_features import ImageTower, split_images
from tests.support.images import pixels, tiny_images_target


def images(family: str, count: int, seed: int = 0):
    return split_images(pixels(family, count, seed))


@pytest.mark.parametrize(
    ("count", "calls"), [(1, [1]), (3, [1, 1, 1]), (4, [4]), (5, [4, 1]), (9, [4, 4, 1])]
)
def test_calls_have_the_sizes_that_were_compiled(count, calls):
    """No call is padded, and each image gets its own row."""
    seen = []

    def rows(pixel_values):
        seen.append(len(pixel_values))
        return pixel_values[:, :1, 0, :5]  # one row an image

    compiled = CompiledTower((3, 12, 12), {1: rows, 4: rows})
    given = images("llava", count)
    found = ImageTower(tiny_images_target("llava"), compiled=compiled).features(given)
    assert seen == calls
    for row, image in zip(found, given, strict=True):
        assert torch.equal(row, image.inputs["pixel_values"][0, :1, 0, :5])


def test_other_images_run_in_eager_mode():
    model = tiny_images_target("qwen2_5_vl")
    compiled = CompiledTower((3, 12, 12), {})
    given = images("qwen2_5_vl", 2)
    assert not compiled.takes(given[0].inputs)
    assert not compiled.takes({"pixel_values": torch.zeros(1, 3, 12, 16)})
    found, own = (ImageTower(model, compiled=one).features(given) for one in (compiled, None))
    assert all(torch.equal(a, b) for a, b in zip(found, own, strict=True))


def test_images_of_many_sizes_are_not_compiled():
    with pytest.raises(NotSupported, match="its inputs have no one size"):
        compile_tower(tiny_images_target("qwen2_5_vl"), Reporter())
    model = tiny_images_target("llava")
    model.config.vision_config.image_size = 20  # not what the tower has positions for
    with pytest.raises(NotSupported, match="it takes more than pixels"):
        compile_tower(model, Reporter())


def test_a_tower_that_cannot_be_traced_stays_eager(monkeypatch):
    model = tiny_images_target("llava")
    own = model.get_image_features

    def breaks(pixel_values, **options):
        return own(pixel_values if pixel_values.sum() < 9 else -pixel_values, **options)

    monkeypatch.setattr(model, "get_image_features", breaks)
    with pytest.raises(TraceError, match="tower cannot be traced as one graph"):
        compile_tower(model, Reporter())


@pytest.mark.parametrize("family", ["llava", "gemma3"])
def test_rows_are_those_of_eager_mode(family, inductor_cache_dir):
    """float64, but for the softmax, which these towers take in float32."""
    model = tiny_images_target(family)
    told: list[Progress] = []
    compiled = compile_tower(model, Reporter(told.append))
    tower, eager = ImageTower(model, compiled=compiled), ImageTower(model)
    for count, seed in ((1, 2), (4, 3), (7, 4)):
        given = images(family, count, seed)
        for row, want in zip(tower.features(given), eager.features(given), strict=True):
            torch.testing.assert_close(row, want, rtol=1e-5, atol=1e-5)
    assert compiled.num_recompiles == 0
    again = compile_tower(tiny_images_target(family, seed=1), Reporter(told.append))
    assert again.describe().startswith("compiled for images of 3 x 12 x 12, 1 or 4 at a time")
    last = [one for one in told if one.done and one.stage == "compile"]
    assert [one.from_cache for one in last[2:]] == [True, True]
    other = split_images(pixels(family, 1))[0].inputs["pixel_values"]
    with torch.no_grad():
        assert not torch.allclose(again.rows(other)[0], compiled.rows(other)[0])
