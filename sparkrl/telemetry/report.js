"use strict";
// Each chart carries [[x, step or heading, [[series, text], ...]], ...]; show the step nearest to the pointer, or move with the arrows.
const tip = document.getElementById("tip");
for (const svg of document.querySelectorAll("svg[data-points]")) {
  const points = JSON.parse(svg.dataset.points);
  const cursor = svg.querySelector(".cursor");
  let current = -1;
  const hide = () => { tip.style.visibility = cursor.style.visibility = "hidden"; };
  const show = (index, pointerY) => {
    current = index;
    const [x, step, values] = points[index];
    const box = svg.getBoundingClientRect();
    const scale = box.width / svg.viewBox.baseVal.width;
    cursor.setAttribute("x1", x);
    cursor.setAttribute("x2", x);
    tip.replaceChildren();
    tip.appendChild(document.createElement("b")).textContent = typeof step === "number" ? "step " + step : step;
    for (const [name, text] of values) {
      const row = tip.appendChild(document.createElement("span"));
      row.appendChild(document.createElement("span")).textContent = name;
      row.appendChild(document.createElement("span")).textContent = text;
    }
    const at = box.left + x * scale;
    const left = at + 14 + tip.offsetWidth > window.innerWidth ? at - 14 - tip.offsetWidth : at + 14;
    tip.style.left = Math.max(4, left) + "px";
    tip.style.top = Math.max(4, Math.min(pointerY - 20, window.innerHeight - tip.offsetHeight - 4)) + "px";
    tip.style.visibility = cursor.style.visibility = "visible";
  };
  const follow = (event) => {
    const box = svg.getBoundingClientRect();
    const x = (event.clientX - box.left) * svg.viewBox.baseVal.width / box.width;
    let best = 0;
    points.forEach((point, index) => { if (Math.abs(point[0] - x) < Math.abs(points[best][0] - x)) best = index; });
    show(best, event.clientY);
  };
  svg.addEventListener("pointermove", follow);
  svg.addEventListener("pointerdown", follow);
  svg.addEventListener("pointerleave", hide);
  svg.addEventListener("blur", hide);
  svg.addEventListener("keydown", (event) => {
    const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!move) return;
    event.preventDefault();
    const next = current < 0 ? (move > 0 ? 0 : points.length - 1) : current + move;
    show(Math.max(0, Math.min(points.length - 1, next)), svg.getBoundingClientRect().top + 40);
  });
}
