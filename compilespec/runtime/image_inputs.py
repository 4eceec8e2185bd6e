"""Finds the images of a prompt, and has the model's processor make tensors of them."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from typing import Any

from compilespec.errors import InvalidRequest, MissingDependency, NotSupported
from compilespec.runtime.chat import chat_options, check_names

_IMAGES, _OTHER = ("pixel_", "image_"), ("video_", "pixel_values_videos", "input_features")
_PARTS = ("image", "image_url")  # of a message, by type
_INSIDE = ("image", "url", "image_url")  # keys of a part that may hold the image


def is_image_input(name: str) -> bool:
    """Whether a tensor of a processor's output belongs to its images."""
    return name.startswith(_IMAGES) and not name.startswith(_OTHER)


def has_images(prompt: Any) -> bool:
    """Whether a prompt holds images: beside text, in messages, or as a processor's output."""
    if not isinstance(prompt, Mapping):
        return False
    if "messages" in prompt:
        return any(_image_parts(prompt["messages"]))
    return "images" in prompt or any(str(name).startswith(_IMAGES + _OTHER) for name in prompt)


def process(prompt: Mapping[str, Any], processor: Any) -> Mapping[str, Any]:
    """What the processor makes of a prompt; a prompt that it made is returned as it is.

    Raises: InvalidRequest (no processor, an image of another form, or what the processor refuses),
        NotSupported (videos, sound), MissingDependency (Pillow, for encoded images).
    """
    if "messages" in prompt:
        made = _process_chat(prompt, processor)
    elif "images" in prompt:
        made = _process_text(prompt, processor)
    else:
        made = prompt
    if other := next((name for name in made if str(name).startswith(_OTHER)), None):
        raise NotSupported(f"the prompt has {other}: expected text and images alone; leave it out")
    if "input_ids" not in made:
        raise InvalidRequest(
            f"the prompt has {', '.join(map(str, made))} without input_ids: expected what the "
            "model's processor returns for text and images"
        )
    return made


def _process_text(prompt: Mapping[str, Any], processor: Any) -> Mapping[str, Any]:
    text, images = prompt.get("prompt"), prompt["images"]
    if others := [name for name in prompt if name not in ("prompt", "images")]:
        raise InvalidRequest(
            f"the prompt has {others[0]!r} beside prompt and images: expected those two alone"
        )
    if not isinstance(text, str) or not isinstance(images, Sequence) or not images:
        raise InvalidRequest(
            f'expected {{"prompt": text, "images": [one, ...]}}, got a prompt of '
            f"{type(text).__name__} and images of {type(images).__name__}"
        )
    _check_processor(processor)
    opened = [open_image(image) for image in images]
    return _call(lambda: processor(text=text, images=opened, return_tensors="pt"))


def _process_chat(prompt: Mapping[str, Any], processor: Any) -> Mapping[str, Any]:
    check_names(prompt)
    _check_processor(processor)
    options = chat_options(prompt, processor)
    messages = [_opened(message) for message in prompt["messages"]]
    return _call(
        lambda: processor.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=True, return_dict=True,
            return_tensors="pt", **options,
        )
    )  # fmt: skip


def _call(make: Any) -> Mapping[str, Any]:
    try:
        made: Mapping[str, Any] = make()
        return made
    except Exception as error:  # processors and templates raise what they like
        why = (str(error).splitlines() or ["no message"])[0]
        raise InvalidRequest(
            f"the model's processor refuses the prompt ({type(error).__name__}: {why}); name every "
            "image once in the text or messages, in the way of its chat template"
        ) from error


def _check_processor(processor: Any) -> None:
    if processor is None:
        raise InvalidRequest(
            "the prompt has images and the engine has no processor: compile a checkpoint that has "
            "one beside it (preprocessor_config.json; Pillow must be installed), give it as "
            "tokenizer=, or pass what it returns, input_ids and pixel_values"
        )


def _opened(message: Any) -> Any:
    """A message whose images are ready for the processor."""
    content = message.get("content") if isinstance(message, Mapping) else None
    if content is None or isinstance(content, str):
        return message
    return {**message, "content": [_opened_part(part) for part in content]}


def _opened_part(part: Any) -> Any:
    if _is_image(part):
        return {"type": "image", "image": open_image(_inside(part))}
    if isinstance(part, Mapping) and part.get("type") == "text":
        return part
    raise InvalidRequest(
        f"a part of a message is {part!r:.60}: expected text or an image; sound and videos are not "
        "taken"
    )


def _inside(part: Mapping[str, Any]) -> Any:
    held = next((part[name] for name in _INSIDE if part.get(name) is not None), None)
    return held.get("url") if isinstance(held, Mapping) else held


def open_image(image: Any) -> Any:
    """An image for the processor: an object of Pillow, an array or a tensor as it is; a `data:` URL
    decoded.  Raises: InvalidRequest, MissingDependency.
    """
    if image is not None and not isinstance(image, str | bytes):
        return image
    if not isinstance(image, str) or not image.startswith("data:image/"):
        raise InvalidRequest(
            f"an image is {image!r:.60}: expected an image of Pillow, an array, or a data: URL "
            "(data:image/png;base64,...); nothing is downloaded or opened here"
        )
    try:
        from PIL import Image
    except ImportError as error:
        raise MissingDependency(
            "images in data: URLs need Pillow: pip install 'compilespec[images]'"
        ) from error
    try:
        data = base64.b64decode(image.partition(",")[2], validate=True)
        return Image.open(io.BytesIO(data)).convert("RGB")
    except Exception as error:  # Pillow's readers raise what they like
        raise InvalidRequest(
            f"an image's data: URL cannot be decoded ({type(error).__name__}): expected base64 of "
            "a PNG, JPEG or another image that Pillow reads"
        ) from error


def _image_parts(messages: Any) -> list[Any]:
    if not isinstance(messages, Sequence) or isinstance(messages, str):
        return []
    contents = [one.get("content") for one in messages if isinstance(one, Mapping)]
    return [
        part
        for content in contents
        if isinstance(content, Sequence) and not isinstance(content, str)
        for part in content
        if _is_image(part)
    ]


def _is_image(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") in _PARTS
