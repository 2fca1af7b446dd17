"""Runs a command and ends all that it started: supervise.py COMMAND [ARGUMENT...]

vLLM is several processes. They, and this one, share a process group, which the owner makes. What comes over stdin ends it:
its end, because the owner closed it or is gone, however that ended, ends the command in order; a line kills it at once.
"""

import os
import pathlib
import signal
import subprocess
import sys
import threading
import time

IN_ORDER_SECONDS = 8
CLEANING_SECONDS = 3


def members(group):
    """The group's processes besides this one that still run."""
    for entry in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            # After the name, which may have anything in it: state, parent, group.
            state, _, own = (entry / "stat").read_text().rpartition(")")[2].split()[:3]
            if int(own) == group and state != "Z" and int(entry.name) != os.getpid():
                yield int(entry.name), (entry / "cmdline").read_text()
        except OSError:
            continue  # It has just ended.


def end(group):
    """Ends whatever is left of the group, and this process too."""
    for process, command in members(group):
        # Python's resource trackers remove the shared memory of the processes that they outlive, then end by themselves.
        if "resource_tracker" not in command:
            try:
                os.kill(process, signal.SIGKILL)
            except ProcessLookupError:
                pass
    deadline = time.monotonic() + CLEANING_SECONDS
    while any(members(group)) and time.monotonic() < deadline:
        time.sleep(0.02)
    os.killpg(group, signal.SIGKILL)


def obey(group, command):
    """Does what the owner wants; see above."""
    if not os.read(sys.stdin.fileno(), 1):
        command.terminate()
        try:
            command.wait(IN_ORDER_SECONDS)
        except subprocess.TimeoutExpired:
            pass
    end(group)


def main():
    group = os.getpgrp()
    if len(sys.argv) < 2 or os.getpid() != group:
        sys.exit(f"{__doc__}\nIt must lead a process group of its own.")
    command = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL)
    threading.Thread(target=obey, args=(group, command), daemon=True).start()
    status = command.wait()
    print(f"the command ended with status {status}", file=sys.stderr, flush=True)
    end(group)


if __name__ == "__main__":
    main()
