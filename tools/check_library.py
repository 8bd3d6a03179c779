"""What a wheel's native module may need of the system it is installed on: python check_library.py WHEEL"""

import io
import sys
import zipfile
from pathlib import Path

from elftools.elf.dynamic import DynamicSection
from elftools.elf.elffile import ELFFile
from elftools.elf.gnuversions import GNUVerSymSection
from elftools.elf.sections import SymbolTableSection

MOST_BYTES = 2_500_000
# glibc's own, and what unwinds exceptions. Everything else is linked statically, or torch's (OpenMP).
SYSTEM = ("libc.so.6", "libm.so.6", "libdl.so.2", "librt.so.1", "libpthread.so.0", "ld-linux", "libgcc_s.so.1")
LOADED = ("Py", "_Py", "GOMP_", "omp_")

wheel = Path(sys.argv[1])
assert wheel.stat().st_size <= MOST_BYTES, f"{wheel.name} has {wheel.stat().st_size} bytes"
with zipfile.ZipFile(wheel) as archive:
    (name,) = (name for name in archive.namelist() if name.endswith(".so"))
    module = ELFFile(io.BytesIO(archive.read(name)))
for section in module.iter_sections():
    if isinstance(section, DynamicSection):
        needed = [tag.needed for tag in section.iter_tags("DT_NEEDED")]
        assert all(library.startswith(SYSTEM) for library in needed), needed
    if isinstance(section, GNUVerSymSection):
        versions = [symbol["ndx"] for symbol in section.iter_symbols()]
    if isinstance(section, SymbolTableSection) and section.name == ".dynsym":
        symbols = list(section.iter_symbols())
# auditwheel compares versions, and so does not see a symbol that has none because the old glibc lacks it.
missing = [
    symbol.name
    for symbol, version in zip(symbols, versions, strict=True)
    if symbol["st_shndx"] == "SHN_UNDEF" and symbol["st_info"]["bind"] == "STB_GLOBAL" and isinstance(version, str)
    if not symbol.name.startswith(LOADED)
]
assert not missing, missing
print(f"{wheel.name}: {wheel.stat().st_size} bytes, needs {', '.join(needed)}")
