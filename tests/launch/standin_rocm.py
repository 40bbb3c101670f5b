"""A stand-in for ROCm's compiler, as far as AITER asks for Python modules; also in standin.Dockerfile."""

from __future__ import annotations

import json
from pathlib import Path

# Notes what it links. Every module it makes has what AITER asks of one, and refuses tensors as one for a GPU does.
HIPCC = """#!/bin/sh
case " $* " in *" -o /dev/null "* | *" -v "*) exit ;; esac
while [ "$1" != -o ]; do shift; done
case $2 in *.so) ;; *) : >"$2"; exit ;; esac
name=$(basename "$2" .so)
echo "$name" >>"${LINKED:-/dev/null}"
include=${PYTHON_INCLUDE:-$(python3 -c 'import sysconfig; print(sysconfig.get_path("include"))')}
exec gcc -shared -fPIC "-I$include" "-DNAME=\\"$name\\"" "-DINIT=PyInit_$name" "$(dirname "$0")/../module.c" -o "$2"
"""
MODULE = """#include <Python.h>
static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, NAME, 0, -1, 0};
PyMODINIT_FUNC INIT(void) {
  PyObject* module = PyModule_Create(&definition);
  PyObject* names = PyModule_GetDict(module);
  PyDict_SetItemString(names, "__builtins__", PyEval_GetBuiltins());
  return PyRun_String(SOURCE, Py_file_input, names, names) ? module : NULL;
}
"""
SOURCE = """
def mha_batch_prefill(*_):
    "Members:"
    raise RuntimeError("the input must be on a GPU")

mha_varlen_fwd = mha_batch_prefill
"""


def import_little(package: Path) -> None:
    """AITER without its other operators, as newer releases import with AITER_AOT_IMPORT=1: they take seconds.

    Its program that writes sources finds no torch, which it can do without, for seconds more.
    """
    (package / "__init__.py").write_text("from .jit import core\n")
    program = package.with_name("aiter_meta") / "csrc/cpp_itfs/mha_fwd_generate.py"
    program.write_text(f"import sys\n\nsys.modules['torch'] = None\n{program.read_text()}")


def write_rocm(folder: Path) -> None:
    """hipcc, which is also its linker (CXX), and hipconfig."""
    (folder / "bin").mkdir(parents=True)
    for name, text in (("hipcc", HIPCC), ("hipconfig", "#!/bin/sh\necho 7.2.26015-fc0010cf6a\n")):
        (folder / "bin" / name).write_text(text)
        (folder / "bin" / name).chmod(0o755)
    (folder / "module.c").write_text(f"#define SOURCE {json.dumps(SOURCE)}\n{MODULE}")
