"""Draw ``panel.svg``: the terminal of a real job whose worker 2 reads from a slow disk. ``nox -s pictures``.

``paceline launch`` runs in a pseudo-terminal. The picture is its screen when the slow worker has been named and the
figures of all workers are there.
"""

from __future__ import annotations

import fcntl
import io
import os
import pty
import re
import select
import struct
import subprocess
import sys
import tempfile
import termios
import time
from itertools import groupby
from pathlib import Path

import pyte
from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.style import Style
from rich.text import Text

COLUMNS, LINES = 100, 26
DEADLINE_S = 120.0
#: Seconds for which the panel is left to settle after the sentence has come.
SETTLE_S = 6.0
COMMAND = "paceline launch -n 4 -s 2 -- python train.py"

TRAIN = """
import time
import torch
import paceline

torch.set_num_threads(1)
net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(784, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10))
store = paceline.kvstore.create("dist_sync")
digits = paceline.data.digits(train=True)

class Files(torch.utils.data.Dataset):
    def __len__(self):
        return len(digits)

    def __getitem__(self, index):
        time.sleep(0.006 if store.rank == 2 else 0.0005)  # worker 2 has the slow disk
        return digits[index]

sampler = paceline.data.ShardedSampler(Files())
sgd = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
optimizer = paceline.DistributedOptimizer(sgd, kvstore=store, model=net)
for epoch in range(1000):
    sampler.set_epoch(epoch)
    for images, labels in torch.utils.data.DataLoader(Files(), batch_size=32, sampler=sampler):
        loss = torch.nn.functional.cross_entropy(net(images), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    if store.rank == 0:
        print(f"epoch {epoch}: loss {loss.item():.3f}", flush=True)
"""


def main() -> None:
    """Run the job and write the picture."""
    screen = watched()
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    console.print(Text(f"$ {COMMAND}", style="bold"))
    for row in shown(screen):
        console.print(row, no_wrap=True, overflow="crop")
    without_fonts = re.sub(
        r"@font-face \{\{.*?\}\}", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL
    )  # they are on other hosts
    path = Path(__file__).with_suffix(".svg")
    path.write_text(console.export_svg(title="paceline launch", code_format=without_fonts, unique_id="panel"))


def watched() -> pyte.Screen:
    """Return the screen of the job in which the slow worker has been named."""
    screen = pyte.Screen(COLUMNS, LINES)
    stream = pyte.ByteStream(screen)
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, COLUMNS, 0, 0))
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "train.py").write_text(TRAIN)
        command = [sys.executable, "-m", "paceline", *COMMAND.split()[1:-2], sys.executable, "train.py"]
        job = subprocess.Popen(command, cwd=folder, stdin=slave, stdout=slave, stderr=slave, start_new_session=True)
        until, named = time.monotonic() + DEADLINE_S, False
        try:
            while time.monotonic() < until:
                if select.select([master], [], [], 0.1)[0]:
                    stream.feed(os.read(master, 65536))
                if not named and "To do:" in " ".join(screen.display):
                    named, until = True, time.monotonic() + SETTLE_S
        finally:
            job.terminate()
            job.wait(DEADLINE_S)
    if not named:
        raise SystemExit(f"no worker was named slow within {DEADLINE_S:g} s:\n" + "\n".join(screen.display))
    return screen


def shown(screen: pyte.Screen) -> list[Text]:
    """Return the rows of a screen with their colours, without empty ones at the end."""
    rows = []
    for y in range(LINES):
        row = Text()
        cells = [screen.buffer[y][x] for x in range(COLUMNS)]
        for (fg, bg, bold), run in groupby(cells, key=lambda cell: (cell.fg, cell.bg, cell.bold)):
            row.append("".join(cell.data for cell in run), Style(color=colour(fg), bgcolor=colour(bg), bold=bold))
        row.rstrip()
        rows.append(row)
    while rows and not rows[-1].plain:
        rows.pop()
    return rows


def colour(name: str) -> str:
    """Return rich's name of a colour of pyte's."""
    if len(name) == 6 and all(letter in "0123456789abcdef" for letter in name):
        return "#" + name
    return {"brown": "yellow"}.get(name, name)


if __name__ == "__main__":
    main()
