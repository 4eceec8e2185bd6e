"""Random JSON schemas, patterns and choices of texts: every output is valid, for any model;
drafts change no token.  Needs llguidance.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import tokenizers
import torch
import transformers

import compilespec
from compilespec import SamplingParams
from compilespec.demo import demo_directory
from compilespec.errors import InvalidRequest, MissingDependency
from compilespec.methods.eagle3 import random_head
from compilespec.runtime.engine import Engine
from compilespec.runtime.guides import Choice, JsonSchema, Regex, Vocabulary, as_guide
from compilespec.runtime.guides.follower import GuideFollower
from tests.support.models import target_info

MAX_SEQ_LEN, COUNT = 640, 600
PROMPTS = ("def f(x):\n", "import json\n\nprint(", "# ", "{")
WORDS = ("a", "id", "name", "x y", "ü", 'q"t', "back\\slash", "0")

needs_llguidance = pytest.mark.skipif(
    __import__("importlib.util").util.find_spec("llguidance") is None,
    reason="needs llguidance: pip install 'compilespec[guide]'",
)


# --- schemas, and what they admit ---


def random_schema(draw: random.Random, depth: int = 2) -> dict[str, Any]:
    """A schema whose instances are short: a random model ends them, sooner or later."""
    kinds = ["boolean", "null", "integer", "string", "pattern", "enum", "const"]
    kind = draw.choice(kinds + ["object", "array", "anyOf"] * 3 * (depth > 0))
    if kind == "integer":
        low = draw.randint(-200, 200)
        return {"type": "integer", "minimum": low, "maximum": low + draw.randint(0, 999)}
    if kind == "string":
        low = draw.randint(0, 3)
        return {"type": "string", "minLength": low, "maxLength": low + draw.randint(0, 3)}
    if kind == "pattern":
        return {
            "type": "string",
            "pattern": draw.choice([r"^[a-f]{1,4}$", r"^\d\d-\d$", "^(a|bc)$"]),
        }
    if kind == "enum":
        values = [*WORDS, 1, -2, True, None, [1, "a"]]
        return {"enum": draw.sample(values, draw.randint(1, 4))}
    if kind == "const":
        return {"const": draw.choice([7, "yes", False, None, {"k": [1, 2]}])}
    if kind == "array":
        low = draw.randint(0, 2)
        items = random_schema(draw, depth - 1)
        return {"type": "array", "items": items, "minItems": low, "maxItems": low + 2}
    if kind == "anyOf":
        return {"anyOf": [random_schema(draw, depth - 1) for _ in range(draw.randint(1, 3))]}
    if kind == "object":
        names = draw.sample(WORDS, draw.randint(0, 4))
        return {
            "type": "object",
            "properties": {name: random_schema(draw, depth - 1) for name in names},
            "required": [name for name in names if draw.random() < 0.6],
            "additionalProperties": False,
        }
    return {"type": kind}


def is_valid(value: Any, schema: dict[str, Any]) -> bool:
    """Whether a schema of `random_schema` admits a value; written from the specification."""
    if "enum" in schema or "const" in schema:
        return any(same(value, one) for one in schema.get("enum", [schema.get("const")]))
    if "anyOf" in schema:
        return any(is_valid(value, one) for one in schema["anyOf"])
    kind = schema["type"]
    if kind == "null":
        return value is None
    if kind == "boolean":
        return isinstance(value, bool)
    if kind == "integer":
        is_integer = isinstance(value, int) and not isinstance(value, bool)
        return is_integer and schema["minimum"] <= value <= schema["maximum"]
    if kind == "string" and isinstance(value, str):
        fits = schema.get("minLength", 0) <= len(value) <= schema.get("maxLength", 99)
        return fits and re.search(schema.get("pattern", ""), value) is not None
    if kind == "array" and isinstance(value, list):
        fits = schema["minItems"] <= len(value) <= schema["maxItems"]
        return fits and all(is_valid(item, schema["items"]) for item in value)
    if kind == "object" and isinstance(value, dict):
        known = schema["properties"]
        whole = set(schema["required"]) <= set(value) <= set(known)
        return whole and all(is_valid(item, known[name]) for name, item in value.items())
    return False


def same(one: Any, other: Any) -> bool:
    """Equal, True and 1 apart."""
    return json.dumps(one) == json.dumps(other)


def test_the_validator_refuses():
    schema = {"type": "object", "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 9},
              "b": {"anyOf": [{"enum": ["x", 1]}, {"type": "null"}]}}, "required": ["a"],
              "additionalProperties": False}  # fmt: skip
    good = [{"a": 3}, {"a": 0, "b": "x"}, {"a": 9, "b": None}]
    bad = [{}, {"a": 10}, {"a": True}, {"a": 3, "b": "y"}, {"a": 3, "b": True}, {"a": 3, "c": 1}, 3]
    assert all(is_valid(one, schema) for one in good)
    assert not any(is_valid(one, schema) for one in bad)
    short = {"type": "array", "items": {"type": "string", "minLength": 1, "maxLength": 2,
             "pattern": "^a"}, "minItems": 1, "maxItems": 2}  # fmt: skip
    assert is_valid(["a", "ab"], short)
    assert not any(is_valid(one, short) for one in ([], ["a"] * 3, ["b"], ["abc"], [""], "a"))


# --- engines ---


@dataclass(frozen=True, kw_only=True)
class Site:
    plain: Engine
    drafted: Engine


def make_site(name: str) -> Site:
    """Float64: one row and S rows differ too little to change a token."""
    sizes: dict[str, Any] = {"backend": "eager", "max_seq_len": MAX_SEQ_LEN, "max_batch_size": 4,
                             "dtype": torch.float64}  # fmt: skip
    if name == "demo":
        plain = compilespec.compile("demo", **sizes)
        return Site(plain=plain, drafted=compilespec.compile("demo", spec="eagle3", **sizes))
    config = transformers.LlamaConfig(
        vocab_size=2048, hidden_size=32, intermediate_size=48, num_hidden_layers=4,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=MAX_SEQ_LEN,
        eos_token_id=0, initializer_range=0.3,
    )  # fmt: skip
    torch.manual_seed(3)
    model = transformers.LlamaForCausalLM(config).double().eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(demo_directory())
    head = random_head(target_info(model, MAX_SEQ_LEN))
    plain = compilespec.compile(model, tokenizer=tokenizer, **sizes)
    drafted = compilespec.compile(
        model, spec="eagle3", draft=head, num_draft_tokens=3, tokenizer=tokenizer, **sizes
    )
    return Site(plain=plain, drafted=drafted)


@pytest.fixture(scope="module", params=["random", pytest.param("demo", marks=pytest.mark.slow)])
def site(request) -> Iterator[Site]:
    made = make_site(request.param)
    yield made
    made.plain.close()
    made.drafted.close()


def sampled(guide: Any, seed: int, **fields: Any) -> SamplingParams:
    return SamplingParams(
        **{"max_new_tokens": COUNT, "temperature": 1.0, "seed": seed, "guide": guide, **fields}
    )


def texts(site: Site, params: Sequence[SamplingParams]) -> list[str]:
    """Of whole outputs, the same with drafts and without."""
    prompts = [PROMPTS[index % len(PROMPTS)] for index in range(len(params))]
    plain = site.plain.generate(prompts, params)
    drafted = site.drafted.generate(prompts, params)
    assert [o.token_ids for o in drafted] == [o.token_ids for o in plain]
    assert [(o.finish_reason, o.error) for o in plain] == [("stop", None)] * len(params)
    tokenizer = site.plain.tokenizer
    return [tokenizer.decode(o.token_ids[:-1]) for o in plain]  # EOS is the last


def check_schemas(site: Site, seeds: Sequence[int]) -> None:
    schemas = [random_schema(random.Random(seed)) for seed in seeds]
    params = [
        sampled(JsonSchema(schema, compact=True), seed)
        for seed, schema in zip(seeds, schemas, strict=True)
    ]
    for text, schema in zip(texts(site, params), schemas, strict=True):
        assert is_valid(json.loads(text), schema), (text, schema)


@needs_llguidance
def test_random_schemas(site):
    check_schemas(site, range(15))


@needs_llguidance
def test_200_random_schemas(site):
    check_schemas(site, range(1000, 1200))


PATTERNS = (r"[a-c]{2,9}/\d+\.\d{2}", r"(yes|no|maybe), (really|not)\n", "[α-ω]{1,5}é?", "x{0,3}")


@needs_llguidance
def test_patterns_and_choices_of_text(site):
    """In any tokenisation; options that begin alike, or hold what means something in a pattern."""
    options = ("a", "ab", "a.c", "a|b", "(x)\n", "é", "a/b\\")
    params = [sampled(pattern, seed) for seed, pattern in enumerate(PATTERNS)]
    params += [sampled(list(options), seed, temperature=3.0) for seed in range(6)]
    came = texts(site, params)
    for text, pattern in zip(came, PATTERNS, strict=False):
        assert re.fullmatch(pattern, text), (text, pattern)
    assert set(came[len(PATTERNS) :]) <= set(options)
    assert len(set(came[len(PATTERNS) :])) > 1


@needs_llguidance
def test_loose_json_has_spaces_where_the_model_wants_them(site):
    """Without `compact` white space is the model's choice; the bias asks for it."""
    space = site.plain.tokenizer.encode(" ")[0]
    schema = {"type": "array", "items": {"enum": [1, 2]}, "minItems": 2, "maxItems": 3}
    loose = sampled(schema, 4, logit_bias={space: 9.0}, max_new_tokens=40, ignore_eos=True)
    (output,) = site.plain.generate([PROMPTS[0]], loose)
    assert output.text.count(" ") > 10
    assert output.finish_reason == "length"
    (text,) = texts(site, [sampled(JsonSchema(schema, compact=True), 4, logit_bias={space: 9.0})])
    assert " " not in text


# --- texts that the tokenizer reads as something else ---

SPELLED: dict[str, tuple[Any, str]] = {
    "choice": (["<|im_start|>x"], "<|im_start|>x"),
    "at the end": (["a <|im_end|>"], "a <|im_end|>"),
    "beyond the logits": (["<far>."], "<far>."),
    "swallows spaces": (["a  <strip> b"], "a  <strip> b"),
    "no special one": (["<tool>f</tool>"], "<tool>f</tool>"),
    "EOS": (["<eos>"], "<eos>"),
    "normalised": (["e\u0301 e\u0301a"], "e\u0301 e\u0301a"),
    "regex": (Regex(r"hello <\|im_end\|>[a]{2}"), "hello <|im_end|>aa"),
    "constant": (JsonSchema({"const": "<|im_end|>"}), '"<|im_end|>"'),
    "enum": (JsonSchema({"enum": ["a<|im_end|>"]}), '"a<|im_end|>"'),
    "member": (
        JsonSchema({"properties": {"<eos>": {"const": 1}}, "required": ["<eos>"], "type": "object",
                    "additionalProperties": False}, compact=True),
        '{"<eos>":1}',
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def awkward() -> Vocabulary:
    """Added tokens of all kinds, one beyond the model's logits; characters are composed."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(demo_directory())
    special = [tokenizers.AddedToken(t, special=True) for t in ("<|im_start|>", "<|im_end|>")]
    tokenizer.add_special_tokens({"additional_special_tokens": special, "eos_token": "<eos>"})
    strip = tokenizers.AddedToken("<strip>", lstrip=True, rstrip=True)
    tokenizer.add_tokens(["<tool>", strip, tokenizers.AddedToken("<far>", special=True)])
    tokenizer.backend_tokenizer.normalizer = tokenizers.normalizers.NFC()
    return Vocabulary(tokenizer, len(tokenizer) - 1)


@needs_llguidance
@pytest.mark.parametrize("pick", [0, -1], ids=["lowest id", "highest id"])
@pytest.mark.parametrize("name", SPELLED)
def test_texts_that_the_tokenizer_reads_as_something_else(awkward, name, pick):
    """Every id of a mask may come, also along drafts, until the text is whole."""
    guide, text = SPELLED[name]
    end = awkward.tokenizer.eos_token_id

    def follower() -> GuideFollower:
        matcher = as_guide(guide).matcher(awkward)
        return GuideFollower(matcher, awkward.num_words, end_ids={end})

    alone, came, masks = follower(), [], []
    while not alone.is_complete:
        (mask,) = alone.masks()
        bits_V = ((mask.unsqueeze(-1) >> torch.arange(32)) & 1).flatten()
        allowed = bits_V.nonzero().flatten().tolist()
        for token in (allowed[0], allowed[-1]):
            assert len(alone.masks([token])) == 2
        assert alone.follow([allowed[pick]]) == (1, None)
        came.append(allowed[pick])
        masks.append(mask)
    assert awkward.tokenizer.decode(came[:-1], clean_up_tokenization_spaces=False) == text
    assert torch.equal(follower().masks(came)[:-1], torch.stack(masks))


# --- what is refused ---

INTERSECTIONS = {
    "allOf": [{"type": "string", "pattern": f"[a-z]{{{n},{7 * n}}}"} for n in range(1, 40)]
}
REFUSED: dict[str, tuple[Any, str]] = {
    "pattern": (Regex("[a-"), "refuses the regular expression: .*unclosed character class"),
    "type": (JsonSchema({"type": "nope"}), "refuses the JSON schema: .*nope"),
    "no json": (JsonSchema("{"), "the schema is no JSON"),
    "deep json": (JsonSchema("[" * 100_000), "nested more than 256 levels deep"),
    "long": (Regex("a" * 70_000), "regular expression .* has 70000 characters; expected at most"),
    "repeats": (Regex("(a{1000}){1000}"), "refuses the regular expression: lexer error: too many"),
    "long and bad": (Regex("(" + "x" * 9000), "refuses the regular expression: .*unclosed group"),
    "intersections": (JsonSchema(INTERSECTIONS), "JSON schema is refused: .* takes more than 3 s"),
    "half": (Regex("\udcc3"), "is no Unicode"),
}  # fmt: skip


@needs_llguidance
@pytest.mark.parametrize("name", REFUSED)
def test_guides_that_llguidance_refuses(name):
    tokenizer = transformers.AutoTokenizer.from_pretrained(demo_directory())
    guide, message = REFUSED[name]
    vocabulary = Vocabulary(tokenizer, 2048)
    for _ in range(2):
        with pytest.raises(InvalidRequest, match=message) as caught:
            guide.matcher(vocabulary)
        assert "\n" not in str(caught.value)
        assert len(str(caught.value)) < 400


@needs_llguidance
def test_a_guide_over_text_needs_a_tokenizer():
    with pytest.raises(InvalidRequest, match="needs a tokenizer and the engine has none"):
        Regex("a").matcher(Vocabulary(None, 100))


@needs_llguidance
def test_grammars_are_compiled_once_and_kept_for_a_while():
    tokenizer = transformers.AutoTokenizer.from_pretrained(demo_directory())
    vocabulary = Vocabulary(tokenizer, 2050)  # two ids that the tokenizer lacks
    one, two = Regex("ab").matcher(vocabulary), Regex("ab").matcher(vocabulary)
    assert one.advance(tokenizer.encode("a")[0])
    assert not torch.equal(one.allowed(), two.allowed())
    assert len(vocabulary.grammars) == 1
    for number in range(70):
        Choice([str(number)]).matcher(vocabulary)
    assert len(vocabulary.grammars) == 64
    assert "regex ab" not in vocabulary.grammars


def test_without_llguidance(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "llguidance", None)
    with pytest.raises(MissingDependency, match=r"pip install 'compilespec\[guide\]'"):
        JsonSchema({"type": "null"}).matcher(Vocabulary(None, 100))
