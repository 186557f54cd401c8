"""``barnraise watch``: the screen of one run. Only ``screen`` and ``dialogs`` import Textual."""
