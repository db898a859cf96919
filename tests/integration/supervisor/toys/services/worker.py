import sys

from services.toy import run

(role,) = (flag.removeprefix("--role=") for flag in sys.argv if flag.startswith("--role="))
run(role)
