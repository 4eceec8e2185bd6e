"""transformers' own `model.generate`, run by an engine: the same call, the same tokens.

python examples/transformers_generate.py [MODEL [SPEC [BACKEND]]]
"""

import sys
import time

import transformers

import compilespec
from compilespec.demo import demo_directory


def main(model: str = "demo", spec: str = "ngram", backend: str = "inductor") -> None:
    path = str(demo_directory()) if model == "demo" else model
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    lm = transformers.AutoModelForCausalLM.from_pretrained(path)
    inputs = tokenizer("def main():\n    import os\n", return_tensors="pt")

    def timed() -> list[int]:
        start = time.perf_counter()
        ids = lm.generate(**inputs, max_new_tokens=64, do_sample=False, repetition_penalty=1.1)[0]
        print(f"-> {len(ids)} tokens in {time.perf_counter() - start:.2f} s")
        return ids.tolist()

    expected = timed()
    compilespec.attach(lm, spec, max_seq_len=256, backend=backend)
    tokens = timed()
    print(tokenizer.decode(tokens), f"the same tokens: {tokens == expected}", sep="\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
