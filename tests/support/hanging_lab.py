# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %%
import time

import torch

from labkit import Comm, World

world = World(2, timeout_s=600)


# %%
def wait_for_what_never_comes():
    comm = Comm()
    if comm.rank == 0:
        time.sleep(600)  # as if it computed
    else:
        print("rank 1 waits")
        comm.recv(torch.zeros(1), 0)


world.run(wait_for_what_never_comes)

# %%
world.run(lambda: Comm().rank * 10)
