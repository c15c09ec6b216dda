"""Run by mpirun, once a rank: `python openmpi_place.py FOLDER`. Keeps a rank's place in an MPI job and does no MPI.

Writes the environment that mpirun has given it, by which a process finds its place in the job, to `FOLDER/RANK`, and
stays until nobody holds `FOLDER/stay` open for writing any more. Needs the stdlib only.
"""

import json
import os
import sys

STAY = "stay"


def main(folder: str) -> None:
    # Opened first, and without waiting for a writer: whoever started the job may be gone by now, killed.
    stay = os.open(os.path.join(folder, STAY), os.O_RDONLY | os.O_NONBLOCK)
    path = os.path.join(folder, os.environ["OMPI_COMM_WORLD_RANK"])
    with open(f"{path}.part", "w") as file:
        json.dump(dict(os.environ), file)
    os.rename(f"{path}.part", path)
    os.set_blocking(stay, True)
    os.read(stay, 1)


if __name__ == "__main__":
    main(sys.argv[1])
