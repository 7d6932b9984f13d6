// In the spec's editor, Tab indents by two spaces; Escape and then Tab leaves it, so that the keyboard is never trapped.

const area = document.getElementById("spec");
let leaving = false;

area.addEventListener("keydown", (event) => {
  if (event.key === "Escape") {
    leaving = true;
    return;
  }
  if (event.key === "Tab" && !event.shiftKey && !leaving) {
    event.preventDefault();
    area.setRangeText("  ", area.selectionStart, area.selectionEnd, "end");
  }
  leaving = false;
});
