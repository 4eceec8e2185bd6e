"""Images in prompts, on their way through a processor: a toy one, and transformers' own."""

from __future__ import annotations

import base64
import functools
import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from compilespec.errors import InvalidRequest, MissingDependency, NotSupported
from compilespec.runtime.image_inputs import has_media, open_image, process
from compilespec.runtime.image_prompts import ImageReader
from compilespec.tracing.load import load_target
from compilespec.tracing.media import IMAGES
from compilespec.tracing.processors import is_processor
from tests.support.fake_executor import geometry
from tests.support.images import IMAGE, tiny_images_target
from tests.support.toy_tokenizer import byte_level_tokenizer

TEMPLATE = "{{ messages }}"


class ToyProcessor:
    """Words are their lengths, and "*" is an image of 9 rows."""

    image_processor, chat_template = object(), TEMPLATE

    def __init__(self) -> None:
        self.tokenizer = byte_level_tokenizer([bytes([byte]) for byte in range(256)], eos="<eos>")
        self.options: dict[str, Any] = {}

    def __call__(self, text: str, images: list[Tensor], return_tensors: str) -> dict[str, Tensor]:
        assert return_tensors == "pt"
        ids: list[int] = []
        for word in text.split():
            ids += [IMAGE] * 9 if word == "*" else [len(word)]
        return {"input_ids": torch.tensor([ids]), "pixel_values": torch.stack(images)}

    def apply_chat_template(self, messages: Any, **options: Any) -> dict[str, Tensor]:
        self.options = options
        parts = [part for message in messages for part in message["content"]]
        text = " ".join("*" if part["type"] == "image" else part["text"] for part in parts)
        return self(text, [p["image"] for p in parts if p["type"] == "image"], "pt")


@functools.cache
def model() -> nn.Module:
    return tiny_images_target("llava")


def picture(seed: int) -> Tensor:
    return torch.randn(3, 12, 12, generator=torch.Generator().manual_seed(seed))


def said(*parts: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(parts)}]}


def text(words: str) -> dict[str, str]:
    return {"type": "text", "text": words}


def reader(processor: Any = None) -> ImageReader:
    return ImageReader(model(), IMAGES, processor, geometry(embeds_width=48, vocab_size=97))


def test_text_and_messages_give_the_same_prompt():
    processor, images = ToyProcessor(), [picture(1), picture(2)]
    first = reader(processor).read({"prompt": "see * and * now", "images": images})
    parts = [{"type": "image", "image": one} for one in images]
    second = reader(processor).read(
        {**said(text("see"), parts[0], text("and"), parts[1], text("now")),
         "template_options": {"enable_thinking": False}}
    )  # fmt: skip
    assert processor.options["enable_thinking"] is False
    assert processor.options["add_generation_prompt"]
    assert first.ids == second.ids == (3, *[IMAGE] * 9, 3, *[IMAGE] * 9, 3)
    assert first.content_ids == second.content_ids
    assert [first.content_ids[place] for place in (0, 10, 20)] == [3, 3, 3]
    assert len({*first.content_ids}) == 19
    assert list(first.rows.places) == [*range(1, 10), *range(11, 20)]
    torch.testing.assert_close(first.rows.rows, second.rows.rows)
    other = reader(processor).read({"prompt": "see * and * now", "images": images[::-1]})
    assert other.content_ids[1:10] == first.content_ids[11:20]


@pytest.mark.parametrize(
    ("prompt", "says"),
    [
        ({"prompt": "see *", "images": []}, 'expected {"prompt": text, "images": '),
        ({"prompt": 3, "images": [picture(1)]}, "got a prompt of int"),
        ({"images": [picture(1)]}, "got a prompt of NoneType"),
        ({"prompt": "*", "images": [picture(1)], "role": 1}, "'role' beside prompt and images"),
        ({"prompt": "*", "images": ["/tmp/a.png"]}, "nothing is downloaded or opened here"),
        ({"prompt": "*", "images": ["https://a/b.png"]}, "nothing is downloaded or opened here"),
        ({"prompt": "*", "images": [None]}, "an image is None"),
        ({"prompt": "* *", "images": [picture(1)]}, "1 image has 9 rows and it has 18 place"),
        ({"prompt": "*", "images": [picture(1), picture(2)]}, "2 images have 18 rows .* 9 place"),
        ({"prompt": "*", "images": [picture(1), picture(2)[:2]]}, "processor refuses the prompt"),
        ({**said({"type": "image"}), "audio": 1}, "'audio' beside messages"),
        (said({"type": "image"}), "an image is None"),
        (said({"type": "image_url", "image_url": {"url": "http://a"}}), "an image is 'http://a'"),
        (said({"type": "image", "image": picture(1)}, {"type": "video"}), "text or image"),
        (said({"type": "image", "image": picture(1)}, text("*")), "9 rows and it has 18"),
    ],
    ids=range(15),
)  # fmt: skip
def test_bad_prompts_are_refused_in_one_line(prompt, says):
    assert has_media(prompt)
    with pytest.raises((InvalidRequest, NotSupported), match=says) as caught:
        reader(ToyProcessor()).read(prompt)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "prompt",
    ["text", [1, 2], said(text("a")), {"input_ids": [1]}, {"messages": 3}, {"messages": [None]}],
    ids=range(6),
)  # fmt: skip
def test_prompts_without_images_are_read_as_ever(prompt):
    assert not has_media(prompt)


def test_a_processor_is_given_in_the_place_of_a_tokenizer():
    processor = ToyProcessor()
    target = load_target(model(), tokenizer=processor)
    assert target.processor is processor
    assert target.tokenizer is processor.tokenizer
    assert not is_processor(processor.tokenizer)
    assert load_target(model()).processor is None


def test_without_pillow_data_urls_name_it(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "PIL", None)
    with pytest.raises(MissingDependency, match=r"pip install .compilespec\[images\]"):
        open_image("data:image/png;base64,AAAA")


def test_data_urls_are_decoded():
    pil = pytest.importorskip("PIL.Image")
    file = io.BytesIO()
    pil.new("L", (3, 2), 7).save(file, "PNG")
    url = "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
    assert (open_image(url).size, open_image(url).mode) == ((3, 2), "RGB")
    for bad in (url[:60], "data:image/png;base64,*", "data:image/png;base64,AAAA"):
        with pytest.raises(InvalidRequest, match="data: URL cannot be decoded"):
            open_image(bad)


def test_transformers_own_processor(tmp_path):
    """LLaVA's, beside its checkpoint: placeholders as many as the tower gives rows."""
    pil = pytest.importorskip("PIL.Image")
    transformers = pytest.importorskip("transformers")
    names = [bytes([byte]) for byte in range(90)]
    tokenizer = byte_level_tokenizer([*names, "<image>", "<eos>"], eos="<eos>")
    sizes = {"shortest_edge": 12}
    images = transformers.CLIPImageProcessorPil(size=sizes, crop_size={"height": 12, "width": 12})
    processor = transformers.LlavaProcessor(
        images, tokenizer, patch_size=4, vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template="{% for m in messages %}{% for p in m.content %}"
        "{{ p.text if p.type == 'text' else '<image>' }}{% endfor %}{% endfor %}",
    )  # fmt: skip
    processor.save_pretrained(tmp_path)
    tiny_images_target("llava").float().save_pretrained(tmp_path)
    target = load_target(tmp_path)
    assert is_processor(target.processor)
    own = ImageReader(
        target.model, IMAGES, target.processor, geometry(embeds_width=48, vocab_size=97)
    )
    image = pil.new("RGB", (16, 14), (9, 99, 200))
    first = own.read({"prompt": "AB<image>C", "images": [image]})
    second = own.read(said(text("AB"), {"type": "image", "image": image}, text("C")))
    assert first.ids == second.ids == (65, 66, *[IMAGE] * 9, 67)
    assert first.content_ids == second.content_ids
    made = process({"prompt": "AB<image>C", "images": [image]}, target.processor)
    assert own.read(dict(made)).content_ids == first.content_ids
