"""Runs a command for as long as this script's stdin is open: supervise.py COMMAND [ARGUMENT...]

vLLM is several processes. They, and this one, share a process group, which the owner makes. When stdin ends, because the owner
closed it or is gone, however it ended, the group gets SIGTERM, and SIGKILL once the command has ended or has taken too long.
"""

import os
import signal
import subprocess
import sys
import threading

PATIENCE_SECONDS = 10


def main():
    if len(sys.argv) < 2 or os.getpid() != os.getpgrp():
        sys.exit(f"{__doc__}\nIt must lead a process group of its own.")
    group = os.getpgrp()
    # The group's SIGTERM is not for this process, which has to see the end of the others.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    command = subprocess.Popen(
        sys.argv[1:],
        stdin=subprocess.DEVNULL,
        # An ignored signal would be ignored by the command too.
        preexec_fn=lambda: signal.signal(signal.SIGTERM, signal.SIG_DFL),
    )

    def end_with_the_owner():
        while os.read(sys.stdin.fileno(), 4096):
            pass
        os.killpg(group, signal.SIGTERM)
        try:
            command.wait(PATIENCE_SECONDS)
        except subprocess.TimeoutExpired:
            pass
        os.killpg(group, signal.SIGKILL)

    threading.Thread(target=end_with_the_owner, daemon=True).start()
    status = command.wait()
    # Whatever the command left behind ends with it, and this process too.
    print(f"the command ended with status {status}", file=sys.stderr, flush=True)
    os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    main()
