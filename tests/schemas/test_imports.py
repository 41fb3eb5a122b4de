"""What importing the contract costs."""

import subprocess
import sys


def test_the_words_of_the_wire_need_the_standard_library_only() -> None:
    """The engine imports schemas.reasons; neither pydantic nor msgpack may come with it."""
    program = (
        "import sys, schemas, schemas.reasons, schemas.errors, schemas.topics;"
        "sys.exit(bool({'pydantic', 'msgpack', 'aiokafka'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
