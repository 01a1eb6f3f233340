"""A bestiary model in a trainer that is not ours: one short script each, to run or to copy.

    python -m bestiary.training.integrations.transformers_trainer --help

Each script trains a checkpoint (folder or hub id) on a JSONL file in the real library, saves as that library saves,
goes on from its own checkpoint (`--resume`) and leaves a Hugging Face checkpoint behind, a PEFT folder where our
adapters trained. What a library needs beyond the model's own surface (`bestiary.models.protocol`) stands in the script,
as a class or a callback with the reason in its docstring: that is the part to copy.

A script imports its library, so each needs the extra that its docstring names; nothing else here imports a script.
"""
