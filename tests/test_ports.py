import subprocess
import sys
from pathlib import Path

from tests.ports import free_port


def test_no_other_process_is_given_a_port_of_ours() -> None:
    program = "from tests.ports import free_port; print(*(free_port(2) for _ in range(40)))"
    other = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    ours = {free_port() for _ in range(40)}
    theirs = {int(port) for port in other.communicate()[0].split()}
    assert other.returncode == 0
    assert len(ours) == len(theirs) == 40
    assert not ours & (theirs | {port + 1 for port in theirs})


def test_no_outgoing_connection_is_given_one() -> None:
    least = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    assert free_port() < least
