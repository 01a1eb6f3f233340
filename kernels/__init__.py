"""How the hot operations run: one public function a file, a plain-torch reference behind each, `dispatch` choosing."""
