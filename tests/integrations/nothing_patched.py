"""Walks all names of torch, transformers and trl before and after Tigon is used: `python nothing_patched.py FOLDER`.

Of every module that is loaded: what can be called or is a table, by identity; of every class its methods; of every
table its entries. Prints a line for each use of Tigon, and exits with what changed.
"""

import sys
import types

import torch
import transformers

HOSTS = ["torch", "transformers"]
try:
    import trl
    import trl_cases

    HOSTS.append("trl")
except ImportError:
    trl = None


def patchable(values):
    """Counters and caches change by themselves. What can be called, and tables of it, do not."""
    kinds = (staticmethod, classmethod, property, dict)
    return {key: value for key, value in values if callable(value) or isinstance(value, kinds)}


def walk():
    found = {}
    for name, module in sorted(sys.modules.items()):
        if name.split(".")[0] not in HOSTS or not isinstance(module, types.ModuleType):
            continue
        for key, value in patchable(vars(module).items()).items():
            found[name, key] = value
            entries = ()
            if isinstance(value, type) and getattr(value, "__module__", "").split(".")[0] in HOSTS:
                entries = vars(value).items()
            elif isinstance(value, dict) and key != "__builtins__":
                entries = dict.items(value)  # not the class's own: lazy tables would import everything
            for entry, own in patchable(entries).items():
                found[name, key, str(entry)] = own
    return found


def changed(before):
    """A module that is imported on first use appears where it was not; that is no change of what was there."""
    now = walk()
    return [key for key, value in before.items() if now.get(key) is not value]


def llama():
    sizes = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, num_attention_heads=4))


def trainer(folder, **options):
    ids = torch.randint(97, (2, 8))
    arguments = transformers.TrainingArguments(
        folder, max_steps=1, report_to=[], use_cpu=True, save_strategy="no", disable_tqdm=True
    )
    rows = [{"input_ids": row, "labels": row} for row in ids]
    return transformers.Trainer(llama(), arguments, train_dataset=rows, **options)


def trl_trainers(folder):
    for make in (trl_cases.dpo, trl_cases.orpo, trl_cases.gkd) if trl else ():
        yield make.__name__, make(folder, trl_cases.model(), max_steps=1)


def plain_uses(folder):
    """Once without Tigon: the hosts fill lazy tables of their own, which is not ours."""
    trainer(folder).train()
    for _, made in trl_trainers(folder):
        made.train()


def uses_of_tigon(folder):
    import tigon
    from tigon.integrations.sam import MicroBatchSAMCallback
    from tigon.integrations.trainer import TigonCallback

    model = llama()
    ids = torch.randint(97, (2, 8))
    with tigon.fuse(model) as fusion:
        model(input_ids=ids, labels=ids).loss.backward()
        assert fusion.report().calls["head"] == 1
        yield "tigon.fuse"
    trainer(folder, callbacks=[TigonCallback(report=False)]).train()
    yield "TigonCallback"
    made = trainer(folder)
    made.add_callback(MicroBatchSAMCallback(made))
    made.train()
    yield "MicroBatchSAMCallback"
    if trl:
        import tigon.integrations.trl
    for name, made in trl_trainers(folder):
        with tigon.integrations.trl.fuse(made) as fusion:
            made.train()
            assert fusion.report().total
            yield f"trl.fuse of {name}"


def check_that_the_walk_sees(before):
    llama = transformers.models.llama.modeling_llama
    places = [
        (torch.nn.functional, "cross_entropy", ("torch.nn.functional", "cross_entropy")),
        (torch.nn.Linear, "forward", ("torch.nn", "Linear", "forward")),
        (llama.LlamaForCausalLM, "forward", (llama.__name__, "LlamaForCausalLM", "forward")),
    ]
    if trl:
        places.append((trl.trainer.utils, "selective_log_softmax", ("trl.trainer.utils", "selective_log_softmax")))
    plain = [getattr(holder, name) for holder, name, _ in places]
    table = transformers.activations.ACT2CLS
    silu, table["silu"] = table["silu"], torch.nn.ReLU
    for holder, name, _ in places:
        setattr(holder, name, lambda *_: None)
    seen = changed(before)
    for (holder, name, key), own in zip(places, plain, strict=True):
        setattr(holder, name, own)
        assert key in seen, key
    table["silu"] = silu
    assert ("transformers.activations", "ACT2CLS", "silu") in seen
    assert not changed(before)


if __name__ == "__main__":
    plain_uses(sys.argv[1])
    before = walk()
    check_that_the_walk_sees(before)
    for what in uses_of_tigon(sys.argv[1]):
        if names := changed(before):
            sys.exit(f"{what} changed {names[:20]}")
        print(f"{what}: none of {len(before)} names changed")
