// What is wider than the screen can be scrolled with the keyboard.
for (const event of ["load", "resize"]) {
  addEventListener(event, () => {
    for (const box of document.querySelectorAll(".display, .md-typeset__scrollwrap")) {
      if (box.scrollWidth > box.clientWidth) box.tabIndex = 0;
    }
  });
}
