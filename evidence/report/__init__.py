"""Results as a page to look at: `html` of what `read_section` makes of saved results."""

from dflash2.evidence.report.page import REPORTED, Section, html, read_section
from dflash2.evidence.report.png import write_pngs

__all__ = ["REPORTED", "Section", "html", "read_section", "write_pngs"]
