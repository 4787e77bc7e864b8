# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # A lab with everything that labs are made of
#
# It is for `tests/course/test_jupyterlab.py`, which opens it in a browser. A ring all-reduce
# (环形全归约) sends $2\,\frac{p-1}{p}\,n$ bytes from each of $p$ ranks.
#
# | | bytes |
# |---|---:|
# | predicted | 12 |

# %%
import io

import ipywidgets as widgets
import matplotlib.pyplot as plt
import torch
from IPython.display import display

from labkit import DDP, GPT, Comm, World, cluster, dry_run, plot, record, watch_collective, what_if

# %%
world = World(2)


# %%
def mean_of_ranks(start):
    comm = Comm()
    print(f"rank {comm.rank} of {comm.size}")
    x = torch.tensor([start + comm.rank])
    comm.all_reduce(x)
    return (x / comm.size).item()


world.run(mean_of_ranks, 10.0)

# %%
# %load_ext labkit

# %%
# %%ranks 2
x = torch.ones(3)
torch.distributed.all_reduce(x)
x.tolist()

# %% [markdown]
# One rank makes a mistake, and the lab goes on.

# %% tags=["raises-exception"]
world.run(lambda: 1 // Comm().rank)


# %%
def bar(height):
    figure, axes = plt.subplots(figsize=(4, 2), layout="constrained")
    axes.bar([0], [height])
    axes.set_ylim(0, 10)
    return figure


bar(5)
plt.show()


# %% [markdown]
# A slider that sends a new picture to one image.


# %%
def png(height):
    figure, file = bar(height), io.BytesIO()
    figure.savefig(file, format="png")
    plt.close(figure)
    return file.getvalue()


picture = widgets.Image(value=png(3), format="png")
slider = widgets.IntSlider(3, 0, 10, description="height")
slider.observe(lambda change: setattr(picture, "value", png(change.new)), "value")
display(slider, picture)

# %% [markdown]
# A slider that draws anew into an output.

# %%
_ = widgets.interact(lambda height: display(bar(height)) or plt.close(), height=(0, 10))

# %% [markdown]
# The widgets of the labs.

# %%
plot.flip_bits(1.0, "fp16")

# %%
plot.steps(watch_collective(world, "all_reduce", "tree"))


# %%
def train(steps=3):
    model = DDP(GPT.preset("tiny"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        model(torch.zeros(4, 16, dtype=torch.long)).sum().backward()
        optimizer.step()


with record() as trace:
    world.run(train)
plot.view(trace)

# %%
what_if(dry_run(train, ranks=64), cluster("v100-cloud"), ranks=2)

# %%
world.close()
