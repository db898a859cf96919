"""Load the C++ kernels of an installed wheel without PyTorch, which the rest of `kvops` imports.
Prints the instruction sets that this CPU can use."""

from importlib import util
from importlib.machinery import PathFinder

package = util.find_spec("kvops")
assert package is not None, "kvops is not installed"
spec = PathFinder.find_spec("_native", package.submodule_search_locations)
assert spec is not None, "the wheel has no C++ kernels"
assert spec.loader is not None
native = util.module_from_spec(spec)
spec.loader.exec_module(native)
print(*native.usable_kernels())
