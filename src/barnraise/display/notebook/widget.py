"""Widget of a notebook that shows a picture and replaces it when the picture changes."""

from __future__ import annotations

import anywidget
import traitlets

# The picture is in a shadow tree, so that its style and that of the notebook do not meet.
_MODULE = """
function render({ model, el }) {
  const root = el.attachShadow({ mode: "open" });
  const show = () => { root.innerHTML = model.get("picture"); };
  model.on("change:picture", show);
  show();
  return () => model.off("change:picture", show);
}
export default { render };
"""


class PictureWidget(anywidget.AnyWidget):
    """Widget whose whole state is the HTML of a picture, made here."""

    _esm = _MODULE
    picture = traitlets.Unicode("").tag(sync=True)
