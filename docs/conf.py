"""How Sphinx makes the site of these pages: ``scripts/docs``."""

from pygments.lexers.special import TextLexer
from sphinx.highlighting import lexers

from ddlf import __version__

lexers["hex"] = TextLexer()  # bytes of the protocol
project = "DDLF"
release = __version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = f"DDLF {release}"
html_show_copyright = False
html_show_sourcelink = False
highlight_language = "none"
myst_heading_anchors = 3
napoleon_use_ivar = True
napoleon_custom_sections = ["What to do", "On failure", "Source"]
autodoc_member_order = "bysource"
autodoc_typehints = "none"  # the text of each argument stands alone
autodoc_default_options = {"members": True, "inherited-members": False}
